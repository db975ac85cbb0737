"""How a process takes part in the mesh: what it hears, whom it sees, and as whom it publishes."""

from __future__ import annotations

from dataclasses import dataclass

from pdmesh.net.events import EventPublisher
from pdmesh.net.nats.bus import NatsBus
from pdmesh.net.registry import RegistryView


@dataclass(frozen=True, slots=True)
class MeshLink:
    """One for each process; all its parts share it."""

    bus: NatsBus
    view: RegistryView
    publisher: EventPublisher
