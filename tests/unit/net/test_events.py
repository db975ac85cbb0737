"""Tests how events are encoded and numbered."""

from __future__ import annotations

import json

import pytest
from google.protobuf import json_format

from pdmesh.errors import InvalidRequest
from pdmesh.events.v1 import events_pb2 as events
from pdmesh.net import subjects
from pdmesh.net.bus import Message
from pdmesh.net.event_json import to_json
from pdmesh.net.events import (
    BINARY,
    CONTENT_TYPE,
    JSON,
    EventPublisher,
    decode_event,
)
from pdmesh.v1.common_pb2 import Usage


class Wire:
    """A bus that records all published messages."""

    is_connected = True

    def __init__(self) -> None:
        self.sent: list[Message] = []

    async def publish(
        self, subject: str, data: bytes, headers: dict[str, str] | None = None
    ) -> None:
        self.sent.append(Message(subject, data, headers or {}))


def header(sequence: int, incarnation: int = 1, publisher: str = "p0") -> events.Header:
    return events.Header(publisher_id=publisher, incarnation=incarnation, sequence=sequence)


FULL = events.RequestFinished(
    header=header(2**63 + 1, incarnation=2**64 - 1),
    request_id="r",
    outcome="completed",
    usage=Usage(num_prompt_tokens=3, num_completion_tokens=4),
    num_rejections=2,
    ttft_ms=1.5,
    e2e_ms=100.0,
)
FULL.header.occurred_at.FromNanoseconds(1_700_000_000_123_000_000)


@pytest.mark.parametrize(
    "event",
    [
        FULL,
        events.InstanceHealth(header=header(1), service="prefill", is_ready=True),
        events.GroupChanged(header=header(1), group_id="g", prefill_ids=["a", "b"]),
        events.HealthChanged(header=header(1), silent_s=0.25, instance_incarnation=2**60),
        events.LeaderChanged(header=header(1), epoch=2**40),
        events.KvBlocks(header=header(1), stored=[b"\x00\xff"], is_cleared=True),
        events.ErrorReported(header=header(1), message="ünï"),
    ],
)
def test_our_json_is_protobufs_json_mapping(event: events.RequestFinished) -> None:
    assert json.loads(to_json(event)) == json_format.MessageToDict(event)
    assert json_format.Parse(to_json(event), type(event)()) == event


async def test_low_rate_events_are_json_and_high_rate_ones_binary_and_the_header_says_so() -> None:
    wire = Wire()
    publisher = EventPublisher(wire, "p0", 7)  # type: ignore[arg-type]
    await publisher.publish(subjects.health_instance("p0"), events.InstanceHealth(is_ready=True))
    await publisher.publish(subjects.kv_blocks("p0"), events.KvBlocks(stored=[b"x" * 16]))
    assert [m.headers[CONTENT_TYPE] for m in wire.sent] == [JSON, BINARY]
    health = decode_event(wire.sent[0], events.InstanceHealth)
    assert (health.is_ready, health.header.publisher_id, health.header.incarnation) == (
        True,
        "p0",
        7,
    )
    assert json.loads(wire.sent[0].data)["isReady"] is True
    assert decode_event(wire.sent[1], events.KvBlocks).stored == [b"x" * 16]


async def test_each_subject_is_numbered_by_itself_from_one() -> None:
    wire = Wire()
    publisher = EventPublisher(wire, "p0", 7)  # type: ignore[arg-type]
    for _ in range(3):
        await publisher.publish(subjects.kv_blocks("p0"), events.KvBlocks())
    await publisher.publish(subjects.instance_load("p0"), events.InstanceLoad())
    *deltas, load = wire.sent
    numbers = [decode_event(m, events.KvBlocks).header.sequence for m in deltas]
    numbers.append(decode_event(load, events.InstanceLoad).header.sequence)
    assert numbers == [1, 2, 3, 1]


@pytest.mark.fault("F30")
@pytest.mark.parametrize(
    ("data", "content_type"),
    [
        (b"{", JSON),
        (b"[]", JSON),
        (b"\xff\xfe", JSON),
        (b"{}", JSON),
        (b'{"header": 5}', JSON),
        (b"[" * 100_000, JSON),
        (b"\xff" * 20, BINARY),
        (b"", BINARY),
    ],
)
def test_garbage_is_refused(data: bytes, content_type: str) -> None:
    with pytest.raises(InvalidRequest):
        decode_event(Message("s", data, {CONTENT_TYPE: content_type}), events.InstanceHealth)


def test_an_unknown_field_of_a_newer_version_is_accepted() -> None:
    data = (
        b'{"header": {"publisherId": "p0", "sequence": "1"}, "fromTheFuture": 1, "isReady": true}'
    )
    assert decode_event(Message("s", data), events.InstanceHealth).is_ready
