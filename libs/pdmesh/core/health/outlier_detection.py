"""Decides from an instance's counters whether it seems faulty, partly by comparison with its peers.
Envoy calls this outlier detection.

A leg is a request's stay on one instance. The instance may fail its legs, refuse all new ones, or
pull KV far slower than its peers. The signals come from real work, so they cost nothing. But the
work itself may have caused a single failure, so all signals are suspicions. Rates are computed over
a window from counters that only grow, so a lost report does no harm.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field

from pdmesh.core.health.fault_judge import Signal
from pdmesh.core.health.fault_levels import Level

LEGS_FAIL, REFUSES_FOREVER, PULLS_SLOW = "LEGS_FAIL", "REFUSES_FOREVER", "PULLS_SLOW"


@dataclass(slots=True)
class Vitals:
    """An instance's counters since it started. Times are in seconds."""

    num_accepted: int = 0
    num_refused: int = 0
    num_ended: int = 0
    num_failed: int = 0
    num_pulls: int = 0
    pull_s: float = 0.0
    pull_bytes: int = 0
    num_slots_used: int = 0  # the slots that are in use now
    num_tokens: int = 0  # the tokens that the engine has computed


@dataclass(frozen=True, slots=True)
class OutlierPolicy:
    window_s: float = 30.0
    fail_share: float = 0.5
    min_failed: int = 5
    min_refused: int = 10
    slow_factor: float = 5.0  # pulls are slow above this many times the median of the peers
    min_pulls: int = 5
    least_slow_s: float = 0.05  # a shorter pull is never slow
    min_peers: int = 3


@dataclass(slots=True)
class _Course:
    incarnation: int
    peers: str  # instances with an equal value are compared with one another
    points: deque[tuple[float, Vitals]] = field(default_factory=deque)


@dataclass(slots=True)
class OutlierDetector:
    """`heard` takes each report. `signals` returns the signals against an instance now."""

    policy: OutlierPolicy = field(default_factory=OutlierPolicy)
    _courses: dict[str, _Course] = field(default_factory=dict)

    def heard(
        self, instance_id: str, incarnation: int, peers: str, vitals: Vitals, now: float
    ) -> None:
        course = self._courses.get(instance_id)
        if course is None or course.incarnation != incarnation:
            course = self._courses[instance_id] = _Course(incarnation, peers)
            course.points.append((now, Vitals()))  # all counts begin at zero
        course.peers = peers
        points = course.points
        points.append((now, vitals))
        while len(points) > 2 and points[1][0] <= now - self.policy.window_s:
            points.popleft()

    def is_idle(self, instance_id: str, incarnation: int) -> bool:
        course = self._courses.get(instance_id)
        if course is None or course.incarnation != incarnation:
            return False
        return not course.points[-1][1].num_slots_used

    def forget(self, instance_id: str) -> None:
        self._courses.pop(instance_id, None)

    def signals(self, instance_id: str, now: float) -> tuple[Signal, ...]:
        course = self._courses.get(instance_id)
        if course is None:
            return ()
        found = (self._errors(course), self._refusals(course), self._pulls(instance_id, course))
        return tuple(s for s in found if s is not None)

    def _errors(self, course: _Course) -> Signal | None:
        (_, first), (_, last) = course.points[0], course.points[-1]
        num_failed = last.num_failed - first.num_failed
        num_ended = last.num_ended - first.num_ended
        if num_failed < self.policy.min_failed or num_failed < self.policy.fail_share * num_ended:
            return None
        return Signal(
            "errors", LEGS_FAIL, Level.PROCESS, detail=f"{num_failed} of {num_ended} legs failed"
        )

    def _refusals(self, course: _Course) -> Signal | None:
        """A signal if the instance refused legs for a whole window while no leg made progress.

        Its slots then hold dead legs.
        """
        (began, first), (at, last) = course.points[0], course.points[-1]
        num_refused = last.num_refused - first.num_refused
        is_moving = (
            last.num_accepted > first.num_accepted
            or last.num_ended > first.num_ended
            or last.num_tokens > first.num_tokens
        )
        is_idle = any(not vitals.num_slots_used for _, vitals in course.points)
        is_short = at - began < self.policy.window_s
        if is_short or is_moving or is_idle or num_refused < self.policy.min_refused:
            return None
        detail = f"{num_refused} refused, none taken, ended or computed, for {at - began:.0f} s"
        return Signal("refusals", REFUSES_FOREVER, Level.PROCESS, detail=detail)

    def _pulls(self, instance_id: str, course: _Course) -> Signal | None:
        policy, own = self.policy, self._pull_s(course)
        if own is None or own < policy.least_slow_s:
            return None
        others = [
            mean
            for other_id, other in sorted(self._courses.items())
            if other.peers == course.peers
            and other_id != instance_id
            and (mean := self._pull_s(other)) is not None
        ]
        if len(others) < policy.min_peers - 1:
            return None
        usual = statistics.median(others)
        if own <= policy.slow_factor * usual:
            return None
        detail = f"{1000 * own:.0f} ms a pull, peers {1000 * usual:.0f} ms"
        return Signal("transfers", PULLS_SLOW, Level.PROCESS, detail=detail)

    def _pull_s(self, course: _Course) -> float | None:
        """The mean time of a pull over the window. None means that there were too few pulls."""
        (_, first), (_, last) = course.points[0], course.points[-1]
        num = last.num_pulls - first.num_pulls
        return (last.pull_s - first.pull_s) / num if num >= self.policy.min_pulls else None
