"""Applies the desired state that a mesh starts with. Without one, blank instances stay blank."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from pdmesh.net.grpc.admin_client import call_leader
from pdmesh.net.nats.bus import NatsBus
from pdmesh.v1.admin_service_pb2 import ApplyDesiredRequest

_LEADER_S: Final = 20.0


async def apply(file: Path, nats_url: str, environment: Mapping[str, str], mesh_token: str) -> None:
    """Wait for a leader and apply the file. Raises MeshError.

    `environment` is that of the masters, which has their admin token.
    """
    request = _request(file)
    bus = await NatsBus.connect(nats_url, "pdmesh-up")
    try:
        await call_leader(
            bus,
            _admin_token(environment),
            lambda stub, metadata, s: stub.ApplyDesired(request, metadata=metadata, timeout=s),
            within_s=_LEADER_S,
            mesh_token=mesh_token,
        )
    finally:
        await bus.close()


def _request(file: Path) -> ApplyDesiredRequest:
    text = file.read_text()
    return ApplyDesiredRequest(text=text, author="pdmesh up", reason="the mesh was started")


def _admin_token(environment: Mapping[str, str]) -> str:
    if (file := environment.get("PDMESH_ADMIN_TOKEN_FILE")) is not None:
        return Path(file).read_text().strip()
    return environment.get("PDMESH_ADMIN_TOKEN", "")
