"""What connects one process to the rest of the mesh: bus, view of the registry, event publisher.

It decides nothing; `nats/server_liveness.py` decides whether the bus works. Links between hosts and
KV connections are elsewhere (`kv/transport`).
"""

from __future__ import annotations

from dataclasses import dataclass

from pdmesh.net.events import EventPublisher
from pdmesh.net.nats.bus import NatsBus
from pdmesh.net.registry import RegistryView


@dataclass(frozen=True, slots=True)
class MeshLink:
    """One per process; all its parts share it."""

    bus: NatsBus
    view: RegistryView
    publisher: EventPublisher
