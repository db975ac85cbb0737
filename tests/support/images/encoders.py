"""Waits for encoders, the instances that compute the embeddings of images.

A mesh's gateway may serve before its encoders are ready.
"""

from __future__ import annotations

from pdmesh.launcher.mesh import Mesh
from pdmesh.net.nats.bus import NatsBus
from pdmesh.net.nats.registry import NatsRegistry
from pdmesh.v1.common_pb2 import INSTANCE_PHASE_READY, ROLE_ENCODER
from tests.support.waiting import until


async def until_encoding(mesh: Mesh, num: int = 1) -> None:
    """Wait until `num` encoders are ready."""
    bus = await NatsBus.connect(mesh.nats_url, "encoder-test")
    view = await NatsRegistry(bus, 3.0).watch()
    ready = (ROLE_ENCODER, INSTANCE_PHASE_READY)
    await until(lambda: [(r.role, r.phase) for r in view.records.values()].count(ready) == num)
    await view.close()
    await bus.close()
