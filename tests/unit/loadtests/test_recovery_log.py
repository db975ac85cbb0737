"""The timeline of one repair, made from the events of the mesh."""

from __future__ import annotations

import pytest

from loadtests.faults.recovery_log import STEPS, EventLog
from pdmesh.events.v1.events_pb2 import (
    FaultReport,
    GroupStep,
    Header,
    HealthChanged,
    NodeReported,
    RequestFinished,
)
from pdmesh.net.bus import Message
from pdmesh.net.event_json import to_json
from pdmesh.net.events import Event

HEADER = Header(publisher_id="x", incarnation=1, sequence=1)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that the log reads. A test changes the only number in the list."""
    now = [100.0]
    monkeypatch.setattr("loadtests.faults.recovery_log.time.monotonic", lambda: now[0])
    return now


def said(event: Event) -> Message:
    return Message("subject", to_json(event), {})  # type: ignore[arg-type]  # a protobuf message


def step(instance_id: str, name: str) -> Message:
    return said(GroupStep(header=HEADER, group_id="chat", step=name, instance_id=instance_id))


@pytest.mark.req("S33", "S34", "S35", "S36")
async def test_each_step_is_the_first_event_that_reports_it(clock: list[float]) -> None:
    log = EventLog()
    await log.on_health(said(HealthChanged(header=HEADER, instance_id="v", to_health="dead")))
    clock[0] = 110.0  # the events before this time belong to an earlier fault
    for handler, message in (
        (log.on_node,
            NodeReported(header=HEADER, devices=[NodeReported.DeviceStatus(device="v", level=3)])),
        (log.on_fault, FaultReport(header=HEADER, instance_id="other", level=5)),
        (log.on_fault, FaultReport(header=HEADER, instance_id="v", level=3)),
    ):  # fmt: skip
        await handler(said(message))
        clock[0] += 1.0
    for name in ("assigned", "loaded", "connected", "serving", "ready"):
        await log.on_step(step("s", name))
        clock[0] += 1.0
    await log.on_step(step("v", "draining"))  # the victim leaves after its substitute is ready
    for outcome in ("failed", "completed"):
        clock[0] += 1.0
        finished = RequestFinished(header=HEADER, outcome=outcome, prefill_id="s", decode_id="d")
        await log.on_finished(said(finished))
    timeline = log.timeline(110.0, "v")
    assert list(timeline) == list(STEPS)
    assert list(timeline.values()) == [0.0, 2.0, 8.0, 3.0, 4.0, 5.0, 6.0, 7.0, 10.0]


async def test_steps_that_were_not_taken_are_absent(clock: list[float]) -> None:
    log = EventLog()
    await log.on_fault(said(FaultReport(header=HEADER, instance_id="v", level=1)))
    assert list(log.timeline(100.0, "v")) == ["noticed", "judged"]
    assert log.timeline(100.0, "other") == {}
    assert log.timeline(101.0, "v") == {}
