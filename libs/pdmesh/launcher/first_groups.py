"""Applies a file with the desired groups of instances when a mesh starts.

Without such a file, the desired state that NATS has stored applies, if there is one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from pdmesh.client.client import Client

_LEADER_S: Final = 20.0


async def apply(file: Path, nats_url: str, environment: Mapping[str, str], mesh_token: str) -> None:
    """Wait for a leader and apply the file. Raises MeshError.

    `environment` is the masters' environment, which contains their admin token.
    """
    token = _admin_token(environment)
    text = await asyncio.to_thread(file.read_text)
    async with Client.connect(
        nats_url, admin_token=token, mesh_token=mesh_token, within_s=_LEADER_S
    ) as client:
        await client.apply(text, author="pdmesh up", reason="the mesh was started")


def _admin_token(environment: Mapping[str, str]) -> str:
    if (file := environment.get("PDMESH_ADMIN_TOKEN_FILE")) is not None:
        return Path(file).read_text().strip()
    return environment.get("PDMESH_ADMIN_TOKEN", "")
