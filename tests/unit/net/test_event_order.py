"""The numbers of events show which events are new, stale or missing."""

from __future__ import annotations

import pytest

from pdmesh.events.v1 import events_pb2 as events
from pdmesh.net.event_order import EventOrder, SequenceGate


def header(sequence: int, incarnation: int = 1, publisher: str = "p0") -> events.Header:
    return events.Header(publisher_id=publisher, incarnation=incarnation, sequence=sequence)


@pytest.mark.fault("F22")
def test_the_gate_separates_new_from_stale_events_and_detects_gaps() -> None:
    gate = SequenceGate()
    seen = [gate.admit(header(s)) for s in (1, 2, 2, 1, 5, 6, 4)]
    new, stale, gap = EventOrder.NEW, EventOrder.STALE, EventOrder.GAP
    assert seen == [new, new, stale, stale, gap, new, stale]
    assert gate.admit(header(7, publisher="p1")) is gap


@pytest.mark.fault("F5")
def test_events_of_an_earlier_incarnation_stay_stale() -> None:
    gate = SequenceGate()
    gate.admit(header(1, incarnation=1))
    assert gate.admit(header(1, incarnation=2)) is EventOrder.NEW
    assert gate.admit(header(99, incarnation=1)) is EventOrder.STALE
    assert gate.admit(header(2, incarnation=2)) is EventOrder.NEW
