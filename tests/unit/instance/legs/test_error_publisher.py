"""Failures are published as events.

A report never waits for the bus, and the number of waiting events is bounded.
"""

from __future__ import annotations

from pdmesh.events.v1.events_pb2 import ErrorReported
from pdmesh.instance.legs.publishing import MAX_ERRORS, ErrorPublisher
from pdmesh.net import subjects
from pdmesh.net.bus import Message
from pdmesh.net.events import EventPublisher, decode_event
from tests.fakes.memory_bus import MemoryBus
from tests.support.waiting import until


async def test_waiting_events_are_bounded_and_the_rest_is_published_at_the_end() -> None:
    bus = MemoryBus()
    heard: list[ErrorReported] = []

    async def on_error(message: Message) -> None:
        heard.append(decode_event(message, ErrorReported))

    await bus.subscribe(subjects.error_reported(), on_error)
    errors = ErrorPublisher(EventPublisher(bus, "decode-0", 1), "decode-0", "decode")
    for number in range(MAX_ERRORS + 3):
        errors.report("KV_TRANSFER_FAILED", "gone", f"req-{number}")
    await errors.publish_rest()
    await until(lambda: len(heard) == MAX_ERRORS)
    assert [e.request_id for e in heard] == [f"req-{n}" for n in range(MAX_ERRORS)]
    assert heard[0].header.sequence == 1
