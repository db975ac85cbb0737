"""Reads and decodes the mesh's events (docs/events.md). Events may be lost, repeated or late.

An event's domain is the third part of its subject, such as `health` or `kv`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Final

from google.protobuf.message import Message as ProtoMessage

from pdmesh.core.suggestion import suggestion
from pdmesh.errors import InvalidRequest
from pdmesh.events.v1 import events_pb2
from pdmesh.net import subjects
from pdmesh.net.bus import Bus, Message
from pdmesh.net.events import decode_event

# The type of each event, by the third and fourth token of its subject.
KINDS: Final[dict[tuple[str, str], type[ProtoMessage]]] = {
    ("health", "instance"): events_pb2.InstanceHealth,
    ("health", "changed"): events_pb2.HealthChanged,
    ("health", "node"): events_pb2.NodeReported,
    ("health", "fault"): events_pb2.FaultReport,
    ("load", "instance"): events_pb2.InstanceLoad,
    ("kv", "blocks"): events_pb2.KvBlocks,
    ("group", "changed"): events_pb2.GroupChanged,
    ("kv", "pin"): events_pb2.PinChanged,
    ("group", "step"): events_pb2.GroupStep,
    ("group", "upgrade"): events_pb2.UpgradeStep,
    ("request", "finished"): events_pb2.RequestFinished,
    ("error", "reported"): events_pb2.ErrorReported,
    ("control", "leader"): events_pb2.LeaderChanged,
    ("control", "audit"): events_pb2.AdminChange,
}
# These events are sent all the time, even when nothing happens.
PERIODIC: Final = frozenset({("health", "instance"), ("health", "node"), ("load", "instance")})
_MAX_WAITING: Final = 1024  # most events that wait for a slow reader before events are dropped


@dataclass(frozen=True, slots=True)
class MeshEvent:
    """One event. docs/events.md lists the message type for each subject."""

    subject: str
    message: ProtoMessage
    lost_before: bool  # whether events were lost between the previous event and this one

    @property
    def domain(self) -> str:
        return self.subject.split(".")[2]

    @property
    def about(self) -> str:
        """The id of the event's object, for example of an instance, a group or a gateway."""
        return self.subject.split(".")[4]


def kind_of(subject: str) -> tuple[str, ...]:
    """The domain and the message name in a subject."""
    return tuple(subject.split(".")[2:4])


def decoded(message: Message) -> ProtoMessage | None:
    """Decode an event. Returns None for a type of event that this release does not have.

    Raises InvalidRequest for a malformed event.
    """
    kind = KINDS.get(kind_of(message.subject))  # type: ignore[arg-type]  # any length
    return decode_event(message, kind) if kind is not None else None


def patterns(domains: Iterable[str]) -> list[str]:
    """The subjects of these domains, or of all. Raises InvalidRequest for an unknown domain."""
    known = sorted({domain for domain, _ in KINDS})
    chosen = list(dict.fromkeys(domains))
    for domain in chosen:
        if domain not in known:
            hint = suggestion(domain, known) or f"; there are {', '.join(known)}"
            raise InvalidRequest(f"there is no {domain}{hint}", field="domains")
    return [subjects.ALL.replace(">", f"{domain}.>") for domain in chosen] or [subjects.ALL]


async def follow(
    bus: Bus, domains: Iterable[str] = (), *, periodic: bool = False
) -> AsyncIterator[MeshEvent]:
    """Yield events from now on. Unknown and malformed events are left out."""
    waiting: asyncio.Queue[Message] = asyncio.Queue(_MAX_WAITING)
    losses = _Losses()
    async with AsyncExitStack() as stack:
        for pattern in patterns(domains):
            subscription = await bus.subscribe(pattern, waiting.put, on_gap=losses.add)
            stack.push_async_callback(subscription.unsubscribe)
        while True:
            message = await waiting.get()
            if kind_of(message.subject) in PERIODIC and not periodic:
                continue
            try:
                event = decoded(message)
            except InvalidRequest:
                continue
            if event is not None:
                yield MeshEvent(message.subject, event, losses.take())


class _Losses:
    """Whether events were lost since the last `take`."""

    def __init__(self) -> None:
        self._are_there = False

    def add(self) -> None:
        self._are_there = True

    def take(self) -> bool:
        found, self._are_there = self._are_there, False
        return found
