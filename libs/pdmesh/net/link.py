"""A process's link to the mesh: its events, its view of the registry, and its publisher."""

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
