"""The objects that connect a process to the mesh: bus, view of the registry, event publisher.

KV between instances does not use them (`kv/transport`).
"""

from __future__ import annotations

from dataclasses import dataclass

from pdmesh.net.events import EventPublisher
from pdmesh.net.nats.bus import NatsBus
from pdmesh.net.registry import RegistryView


@dataclass(frozen=True, slots=True)
class MeshLink:
    """A process has one link, which all parts of the process share."""

    bus: NatsBus
    view: RegistryView
    publisher: EventPublisher
