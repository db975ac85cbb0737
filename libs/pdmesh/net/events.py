"""Encodes and numbers the events that services exchange over the bus (docs/events.md).

Frequent events (KV deltas and loads) are binary. All other events use protobuf's JSON mapping, so
that people and tools can read them. The `content-type` header names the encoding. With the numbers,
`event_order.py` finds repeated and late events.
"""

from __future__ import annotations

import time
from typing import Final, Protocol, TypeVar

from google.protobuf import json_format
from google.protobuf.message import DecodeError
from google.protobuf.message import Message as ProtoMessage

from pdmesh.errors import InvalidRequest
from pdmesh.events.v1 import events_pb2
from pdmesh.events.v1.events_pb2 import Header
from pdmesh.net.bus import Bus, Message
from pdmesh.net.event_json import to_json
from pdmesh.telemetry import traces

CONTENT_TYPE: Final = "content-type"
TRACEPARENT: Final = "traceparent"
JSON: Final = "application/json"
BINARY: Final = "application/x-protobuf"
BINARY_KINDS: Final[tuple[type[ProtoMessage], ...]] = (
    events_pb2.KvBlocks,
    events_pb2.InstanceLoad,
)


class Event(Protocol):
    """A message that begins with a Header."""

    @property
    def header(self) -> Header: ...

    def SerializeToString(self) -> bytes: ...  # noqa: N802


T = TypeVar("T", bound=ProtoMessage)


class EventPublisher:
    """Numbers and encodes the events of one process."""

    def __init__(self, bus: Bus, publisher_id: str, incarnation: int) -> None:
        self._bus = bus
        self._publisher_id = publisher_id
        self._incarnation = incarnation
        self._sequences: dict[str, int] = {}  # a process publishes on few subjects

    async def publish(self, subject: str, message: Event) -> None:
        """Fill in the header and send the event.

        An event that cannot be sent leaves a gap in the sequence.
        """
        sequence = self._sequences.get(subject, 0) + 1
        self._sequences[subject] = sequence
        header = message.header
        header.publisher_id = self._publisher_id
        header.incarnation = self._incarnation
        header.sequence = sequence
        header.occurred_at.FromNanoseconds(time.time_ns())
        is_binary = isinstance(message, BINARY_KINDS)
        headers = {CONTENT_TYPE: BINARY if is_binary else JSON}
        if traceparent := traces.current_traceparent():
            headers[TRACEPARENT] = traceparent
        assert isinstance(message, ProtoMessage)
        data = message.SerializeToString() if is_binary else to_json(message)
        await self._bus.publish(subject, data, headers)


def decode_event(message: Message, kind: type[T]) -> T:
    """Decode an event. Raises InvalidRequest if the message is not an event of `kind`."""
    is_binary = message.headers.get(CONTENT_TYPE, JSON) == BINARY
    event = kind()
    try:
        if is_binary:
            event.ParseFromString(message.data)
        else:
            json_format.Parse(message.data, event, ignore_unknown_fields=True)
    except (DecodeError, json_format.ParseError, UnicodeDecodeError, RecursionError) as exc:
        raise InvalidRequest(f"not a valid {kind.DESCRIPTOR.full_name}", field="event") from exc
    header = getattr(event, "header", None)
    if not isinstance(header, Header) or not header.publisher_id or not header.sequence:
        raise InvalidRequest(f"{kind.DESCRIPTOR.full_name} without a header", field="header")
    return event
