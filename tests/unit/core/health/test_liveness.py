"""Liveness from leases, heartbeats and incarnations, and when no process may be judged."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pdmesh.core.health.liveness import (
    MAX_TOMBSTONES,
    BusLost,
    BusRestored,
    Event,
    Health,
    HealthChanged,
    HealthTracker,
    Heartbeat,
    RecordSeen,
    RecordVanished,
)
from pdmesh.core.model import Tick


@pytest.fixture
def tracker() -> Iterator[HealthTracker]:
    tracker = HealthTracker(lease_s=1.0)
    yield tracker
    tracker.check_invariants()


def run(tracker: HealthTracker, *timed: tuple[float, Event]) -> list[tuple[Health, str]]:
    return [(c.after, c.cause) for at, event in timed for c in tracker.handle(event, at)]


def ticks(start: float, end: float) -> list[tuple[float, Event]]:
    return [(start + i / 10, Tick()) for i in range(int((end - start) * 10) + 1)]


def test_a_record_makes_an_instance_healthy_at_once(tracker: HealthTracker) -> None:
    changes = tracker.handle(RecordSeen("p0", 1, "prefill"), now=0.0)
    assert changes == [HealthChanged("p0", 1, "prefill", None, Health.HEALTHY, "registered")]


def test_silence_makes_an_instance_suspect_then_dead(tracker: HealthTracker) -> None:
    tracker.handle(RecordSeen("p0", 1, "prefill"), now=0.0)
    tracker.handle(Heartbeat("p0", 1), now=0.5)
    assert run(tracker, *ticks(0.5, 4.0)) == [
        (Health.SUSPECT, "heartbeat_missed"),
        (Health.DEAD, "heartbeat_missed"),
    ]
    assert run(tracker, (4.1, Heartbeat("p0", 1))) == []


def test_a_heartbeat_clears_suspicion(tracker: HealthTracker) -> None:
    tracker.handle(RecordSeen("p0", 1, "prefill"), now=0.0)
    run(tracker, *ticks(0.0, 1.5))
    assert run(tracker, (1.6, Heartbeat("p0", 1))) == [(Health.HEALTHY, "heartbeat_resumed")]


def test_the_end_of_a_lease_and_a_goodbye_are_death_by_different_causes(
    tracker: HealthTracker,
) -> None:
    for name in ("p0", "p1"):
        tracker.handle(RecordSeen(name, 1, "prefill"), now=0.0)
    assert run(tracker, (0.1, RecordVanished("p0", True)), (0.2, RecordVanished("p1", False))) == [
        (Health.DEAD, "lease_expired"),
        (Health.DEAD, "deregistered"),
    ]
    assert tracker.healths() == {}


@pytest.mark.fault("F5")
def test_a_new_incarnation_replaces_the_old_one_which_never_revives(
    tracker: HealthTracker,
) -> None:
    tracker.handle(RecordSeen("p0", 1, "prefill"), now=0.0)
    changes = tracker.handle(RecordSeen("p0", 2, "prefill"), now=0.1)
    assert [(c.incarnation, c.after, c.cause) for c in changes] == [
        (1, Health.DEAD, "replaced"),
        (2, Health.HEALTHY, "registered"),
    ]
    late = (RecordSeen("p0", 1, "prefill"), Heartbeat("p0", 1))
    assert run(tracker, *((0.2, event) for event in late)) == []
    run(tracker, (0.3, RecordVanished("p0", False)))
    assert run(tracker, *((0.4, event) for event in late)) == []
    assert "p0" not in tracker.healths()


@pytest.mark.fault("F19")
def test_a_worker_cut_off_from_the_bus_is_back_when_it_registers_again(
    tracker: HealthTracker,
) -> None:
    """The instance never died, but its lease ended behind a network partition. If the instance had
    to restart first, it would be lost (I8).
    """
    tracker.handle(RecordSeen("p0", 1, "prefill"), now=0.0)
    tracker.handle(RecordVanished("p0", is_lease_end=True), now=3.0)
    assert run(tracker, (9.0, Heartbeat("p0", 1))) == []
    assert run(tracker, (9.1, RecordSeen("p0", 1, "prefill"))) == [(Health.HEALTHY, "registered")]


@pytest.mark.fault("F18")
def test_no_process_is_judged_while_the_bus_is_away_nor_right_after(tracker: HealthTracker) -> None:
    tracker.handle(RecordSeen("p0", 1, "prefill"), now=0.0)
    tracker.handle(BusLost(), now=0.1)
    assert run(tracker, *ticks(0.1, 60.0)) == []
    tracker.handle(BusRestored(), now=60.0)
    assert run(tracker, *ticks(60.0, 60.9)) == []
    assert run(tracker, *ticks(61.0, 61.5)) == [(Health.SUSPECT, "heartbeat_missed")]


def test_a_pause_of_the_monitor_itself_makes_no_process_dead(tracker: HealthTracker) -> None:
    """The monitor was stopped for a minute (SIGSTOP). Its first tick comes before the heartbeats
    that wait in the socket.
    """
    tracker.handle(RecordSeen("p0", 1, "prefill"), now=0.0)
    assert run(tracker, (0.5, Tick()), (60.5, Tick()), (60.6, Heartbeat("p0", 1))) == []


def test_tombstones_are_bounded(tracker: HealthTracker) -> None:
    for incarnation in range(MAX_TOMBSTONES + 100):
        tracker.handle(RecordSeen("p0", incarnation + 1, "prefill"), now=0.0)
    tracker.check_invariants()
