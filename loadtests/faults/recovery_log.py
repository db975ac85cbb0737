"""Collects a mesh's reports about its faults and repairs, and makes the timeline of one repair.

The time of an event is read from this process's monotonic clock when the event arrives, which is
some milliseconds after it happened. So all times come from one clock.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from pdmesh.events.v1.events_pb2 import (
    FaultReport,
    GroupStep,
    HealthChanged,
    InstanceHealth,
    NodeReported,
    RequestFinished,
)
from pdmesh.net import subjects
from pdmesh.net.bus import Message
from pdmesh.net.events import decode_event
from pdmesh.net.nats.bus import NatsBus
from pdmesh.net.nats.registry import NatsRegistry
from pdmesh.net.registry import RecordChanged

# The measured steps of a repair, in order.
STEPS: Final = (
    "noticed", "judged", "taken out", "assigned", "loaded", "connected", "serving", "ready",
    "first request",
)  # fmt: skip
_TAKEN_OUT: Final = frozenset({"lost", "taken_out", "failed", "draining"})
_LEASE_S: Final = 3.0  # the lease of our view of the registry; this process registers nothing


@dataclass(frozen=True, slots=True)
class Entry:
    """One report. `instance_id` is the instance that it is about, and `level` the level of a
    fault.
    """

    at: float
    kind: str  # one of: health, fault, device, signal, record, step, served
    instance_id: str
    what: str = ""
    level: int = 0


class EventLog:
    """The reports so far. `watching` adds new reports."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self._incarnations: dict[str, int] = {}

    def timeline(self, began: float, victim: str) -> dict[str, float]:
        """Seconds from the fault to each step so far. No other repair may be going on."""
        found: dict[str, Entry | None] = {
            "noticed": self._first(began, lambda e: e.instance_id == victim and _is_word(e)),
            "judged": self._first(began, lambda e: e.instance_id == victim and _is_verdict(e)),
            "taken out": self._first(began, lambda e: e.instance_id == victim and _is_out(e)),
            "assigned": self._first(began, lambda e: (e.kind, e.what) == ("step", "assigned")),
        }
        if (assigned := found["assigned"]) is not None:
            for step in STEPS[4:8]:
                key = ("step", assigned.instance_id, step)
                found[step] = self._first_of(assigned.at, *key)
            key = ("served", assigned.instance_id, "")
            found[STEPS[8]] = self._first_of(assigned.at, *key)
        return {step: each.at - began for step in STEPS if (each := found.get(step)) is not None}

    def _first(self, since: float, wanted: Callable[[Entry], bool]) -> Entry | None:
        return next((e for e in self._entries if e.at >= since and wanted(e)), None)

    def _first_of(self, since: float, kind: str, instance_id: str, what: str) -> Entry | None:
        key = (kind, instance_id, what)
        return self._first(since, lambda e: (e.kind, e.instance_id, e.what) == key)

    def _note(self, kind: str, instance_id: str, what: str = "", level: int = 0) -> None:
        self._entries.append(Entry(time.monotonic(), kind, instance_id, what, level))

    # --- reports ----------------------------------------------------------------------------------

    def on_record(self, change: RecordChanged) -> None:
        """Add an entry if an incarnation of the instance has ended."""
        now = change.record.incarnation if change.record is not None else 0
        if self._incarnations.get(change.instance_id, 0) not in (now, 0):
            self._note("record", change.instance_id, "replaced" if now else "gone")
        self._incarnations[change.instance_id] = now

    async def on_health(self, message: Message) -> None:
        event = decode_event(message, HealthChanged)
        self._note("health", event.instance_id, event.to_health)

    async def on_fault(self, message: Message) -> None:
        event = decode_event(message, FaultReport)
        self._note("fault", event.instance_id, level=event.level)

    async def on_node(self, message: Message) -> None:
        for device in decode_event(message, NodeReported).devices:
            self._note("device", device.device, level=device.level)

    async def on_heartbeat(self, message: Message) -> None:
        event = decode_event(message, InstanceHealth)
        for signal in event.signals:
            self._note("signal", event.header.publisher_id, level=signal.level)

    async def on_step(self, message: Message) -> None:
        event = decode_event(message, GroupStep)
        self._note("step", event.instance_id, event.step)

    async def on_finished(self, message: Message) -> None:
        event = decode_event(message, RequestFinished)
        if event.outcome == "completed":
            for instance_id in {event.prefill_id, event.decode_id}:
                self._note("served", instance_id)


def _is_word(entry: Entry) -> bool:
    """Whether the entry reports a sign of a fault."""
    is_told = entry.kind in {"device", "signal"} and entry.level > 0
    return is_told or (entry.kind == "health" and entry.what != "healthy") or _is_verdict(entry)


def _is_verdict(entry: Entry) -> bool:
    """Whether the health-monitor or the registry reports that the instance is gone or faulty."""
    is_dead = entry.kind == "health" and entry.what == "dead"
    return is_dead or entry.kind == "record" or (entry.kind == "fault" and entry.level > 0)


def _is_out(entry: Entry) -> bool:
    return entry.kind == "step" and entry.what in _TAKEN_OUT


@asynccontextmanager
async def watching(bus: NatsBus) -> AsyncIterator[EventLog]:
    log = EventLog()
    view = await NatsRegistry(bus, _LEASE_S).watch()
    for instance_id, record in view.records.items():
        log.on_record(RecordChanged(instance_id, record))
    view.on_change(log.on_record)
    for subject, handler in (
        (subjects.health_changed(), log.on_health),
        (subjects.fault_report(), log.on_fault),
        (subjects.node_reported(), log.on_node),
        (subjects.health_instance(), log.on_heartbeat),
        (subjects.group_step(), log.on_step),
        (subjects.request_finished(), log.on_finished),
    ):
        await bus.subscribe(subject, handler)
    try:
        yield log
    finally:
        await view.close()
