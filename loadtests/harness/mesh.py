"""Starts the mesh under test with pdmesh's own launcher, on free ports, in a private directory."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from loadtests.harness.processes import ProcessSet
from pdmesh.launcher.mesh import Mesh
from pdmesh.launcher.spec import EngineKind, MeshSpec

# No scenario has more requests open at once than this, so none is refused.
_NUM_SLOTS: Final = 256
_SIM_SETTINGS: Final = {
    "SIM_LAW": "zero",
    "SIM_EOS_PERIOD": "0",  # every answer runs to its max_tokens
    "NUM_SLOTS": str(_NUM_SLOTS),
    "MAX_RETRIEVALS": str(_NUM_SLOTS),
}


@dataclass(frozen=True, slots=True)
class MeshOptions:
    engine: EngineKind
    num_gateways: int = 1
    is_fusion: bool = False
    model_dir: str = ""  # empty: the launcher's default
    max_model_len: int | None = None  # None: the engine's default
    env: Mapping[str, str] = field(default_factory=dict)  # environment of all services

    @property
    def description(self) -> str:
        instances = "1 fusion" if self.is_fusion else "1 prefill, 1 decode"
        law = f", zero law, {_NUM_SLOTS} slots each" if self.engine == "sim" else ""
        return f"{self.num_gateways} gateway(s), {instances} ({self.engine}{law})"


@dataclass(frozen=True, slots=True)
class RunningMesh:
    host: str
    port: int
    processes: ProcessSet
    description: str
    ops: Mapping[str, str]  # host:port of each service's metrics


@asynccontextmanager
async def running_mesh(options: MeshOptions) -> AsyncIterator[RunningMesh]:
    """A mesh that is ready for requests. At the end, it is stopped and its directory is removed."""
    with tempfile.TemporaryDirectory(prefix="pdmesh-load-") as directory:
        async with Mesh(_spec(options), Path(directory), report=_report) as mesh:
            url = urlsplit(mesh.http_url)
            assert url.hostname is not None
            assert url.port is not None
            pids = {name: mesh.pid(name) for name in mesh.names}
            yield RunningMesh(
                url.hostname,
                url.port,
                ProcessSet(pids),
                options.description,
                {name: ops for name in mesh.names if (ops := mesh.ops_address(name))},
            )


def _spec(options: MeshOptions) -> MeshSpec:
    settings = dict(instance_settings(options.engine))
    if options.max_model_len is not None:
        settings["MAX_MODEL_LEN"] = str(options.max_model_len)
    return MeshSpec(
        engine=options.engine,
        model_dir=Path(options.model_dir) if options.model_dir else None,
        num_prefill=0 if options.is_fusion else 1,
        num_decode=0 if options.is_fusion else 1,
        num_fusion=1 if options.is_fusion else 0,
        num_gateways=options.num_gateways,
        http_port=0,
        grpc_port=0,
        env=options.env,
        service_env={
            "prefill": {f"PDMESH_PREFILL_{key}": value for key, value in settings.items()},
            "decode": {f"PDMESH_DECODE_{key}": value for key, value in settings.items()},
        },
    )


def instance_settings(engine: EngineKind) -> dict[str, str]:
    return _SIM_SETTINGS if engine == "sim" else {}


def _report(line: str) -> None:
    print(line, file=sys.stderr)
