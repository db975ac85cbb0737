"""Records incidents: what went wrong with one run of a process, and what was done about it.

An incident opens when the health-monitor suspects the process or finds a fault. Later actions of
the master and the gateways become steps of the incident: the process leaves its group, another
instance takes its place, requests continue elsewhere. An incident ends in one of four ways. The
process is well again, or it has deregistered, or a new process has registered under its name, or
another instance serves in the place of a dead process.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from pdmesh.core.history.ended_request import EndedRequest

MAX_INCIDENTS: Final = 100
MAX_STEPS: Final = 40  # of one incident
# The most lost instances that are remembered for incidents that open later.
_MAX_WAITING: Final = 1024
_MAX_EARLY: Final = 256  # steps of the master that no incident shows yet
# An incident counts events up to this time before its beginning or after its end.
_TOGETHER_S: Final = 60.0
_CAUSES: Final = {
    "lease_expired": "its lease ended",
    "heartbeat_missed": "no heartbeat",
    "replaced": "another process registered under its name",
    "heartbeat_resumed": "heartbeats again",
    "registered": "it registered again",
    "deregistered": "it left",
}
_ACTIONS: Final = {
    "ignore": "nothing is done",
    "retry": "its requests are tried again",
    "restart_process": "its process is restarted",
    "replace_instance": "it is replaced",
    "drain_node": "its node is drained",
    "eject_node": "its node is ejected",
}


@dataclass(frozen=True, slots=True)
class HealthTurned:
    """The health-monitor's judgement changed. `health` is healthy, suspect or dead."""

    instance_id: str
    incarnation: int
    health: str
    cause: str


@dataclass(frozen=True, slots=True)
class FaultTurned:
    """The health-monitor found a fault. With level 0, it no longer finds one."""

    instance_id: str
    incarnation: int
    level: int
    reasons: tuple[str, ...] = ()
    action: str = ""
    held_back: str = ""


@dataclass(frozen=True, slots=True)
class MemberStepped:
    """The master reports a step of a member of a group, such as `lost` or `serving`.

    `replaces` is the instance whose place the member takes.
    """

    instance_id: str
    incarnation: int
    step: str
    group_id: str
    role: str = ""
    replaces: str = ""


@dataclass(frozen=True, slots=True)
class Ordered:
    """An operator took the instance out of service, or put it back."""

    instance_id: str
    what: str


IncidentEvent = HealthTurned | FaultTurned | MemberStepped | Ordered | EndedRequest


@dataclass(slots=True)
class Trouble:
    """An incident. Times are seconds since 1970. While the incident is open, `ended_at` is 0."""

    instance_id: str
    incarnation: int
    began_at: float
    cause: str
    ended_at: float = 0.0
    steps: list[tuple[float, str]] = field(default_factory=list)
    num_moved: int = 0  # requests that continued elsewhere
    num_failed: int = 0  # requests that failed after they lost the instance
    is_dead: bool = False
    successor: str = ""  # the instance that takes the place of the process
    is_replaced: bool = False  # the successor serves

    def note(self, at: float, what: str) -> None:
        if len(self.steps) < MAX_STEPS and (not self.steps or self.steps[-1][1] != what):
            self.steps.append((at, what))

    def end(self, at: float, what: str) -> None:
        self.note(at, what)
        self.ended_at = at

    def end_if_replaced(self, at: float) -> None:
        """End the incident of a dead process whose successor serves."""
        if self.is_dead and self.is_replaced and not self.ended_at:
            self.ended_at = at

    def is_near(self, at: float) -> bool:
        """Whether an event at time `at` may still belong to the incident."""
        return not self.ended_at or at - self.ended_at < _TOGETHER_S

    def step(self, event: MemberStepped, at: float) -> None:
        """Note a step of the master with the process, or with its successor."""
        if event.replaces == self.instance_id:
            self.successor, self.is_replaced = event.instance_id, False
            role = f" as {event.role}" if event.role else ""
            self.note(at, f"{event.instance_id} takes its place{role} in {event.group_id}")
        elif event.incarnation == self.incarnation and event.instance_id == self.instance_id:
            self.note(at, f"group {event.group_id}: {event.step.replace('_', ' ')}")
        elif event.step == "serving" and event.instance_id == self.successor:
            self.is_replaced = True
            self.note(at, f"{self.successor} serves in its place")


@dataclass(slots=True)
class _EarlySteps:
    """Steps of the master that wait for the verdict that opens their incident.

    The master and the health-monitor publish independently, so a step may arrive first. Each step
    waits with its time and the name of the instance whose incident it belongs to.
    """

    _waiting: deque[tuple[float, str, MemberStepped]] = field(
        default_factory=lambda: deque(maxlen=_MAX_EARLY)
    )

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, about: str, event: MemberStepped, now: float) -> None:
        self._waiting.append((now, about, event))

    def add_serving(self, event: MemberStepped, now: float) -> None:
        """Add the step to those of each instance that the serving instance replaces."""
        replaced = {e.replaces for _, _, e in self._waiting if e.instance_id == event.instance_id}
        for about in sorted(replaced - {""}):
            self.add(about, event, now)

    def take(self, trouble: Trouble, now: float) -> Iterator[tuple[float, MemberStepped]]:
        """Remove the steps about the incident's instance, and yield those about its incarnation.

        These begin with the loss of the incarnation. A step without a loss before it belongs to an
        orderly departure.
        """
        waiting, is_its = [*self._waiting], False
        self._waiting.clear()
        for at, about, event in waiting:
            if about != trouble.instance_id:
                self._waiting.append((at, about, event))
                continue
            if event.step == "lost":
                is_its = event.incarnation == trouble.incarnation
            if is_its and now - at <= _TOGETHER_S:
                yield at, event


@dataclass(slots=True)
class IncidentBook:
    """All incidents. Only `handle` changes them. At the bound, the oldest incident is dropped."""

    _troubles: OrderedDict[tuple[str, int], Trouble] = field(default_factory=OrderedDict)
    # Requests often notice a death before the health-monitor does. For each lost instance: the time
    # of the last loss, and how many requests moved and failed.
    _lost: OrderedDict[str, tuple[float, int, int]] = field(default_factory=OrderedDict)
    _early: _EarlySteps = field(default_factory=_EarlySteps)

    def handle(self, event: IncidentEvent, now: float) -> None:
        """`now` is in seconds since 1970."""
        match event:
            case HealthTurned():
                self._on_health(event, now)
            case FaultTurned():
                self._on_fault(event, now)
            case MemberStepped():
                self._on_step(event, now)
            case Ordered():
                for trouble in self._open(event.instance_id):
                    trouble.note(now, event.what)
            case EndedRequest():
                self._on_request(event, now)

    def latest(self) -> list[Trouble]:
        """All incidents, the latest one last."""
        return list(self._troubles.values())

    def check_invariants(self) -> None:
        assert len(self._troubles) <= MAX_INCIDENTS
        assert len(self._lost) <= _MAX_WAITING
        assert len(self._early) <= _MAX_EARLY
        for trouble in self._troubles.values():
            assert len(trouble.steps) <= MAX_STEPS
            assert not trouble.ended_at or trouble.ended_at >= trouble.began_at

    def _on_health(self, event: HealthTurned, now: float) -> None:
        why = _CAUSES.get(event.cause, event.cause)
        if event.health == "healthy":
            self._recovered(event, why, now)
        elif event.cause == "deregistered":
            for trouble in self._open(event.instance_id):
                trouble.end(now, "it left in order")
        else:
            trouble = self._begin(event.instance_id, event.incarnation, f"{why}: ", now)
            trouble.note(now, f"judged {event.health}: {why}")
            trouble.cause = f"{event.health}: {why}"
            trouble.is_dead = event.health == "dead"
            trouble.end_if_replaced(now)

    def _recovered(self, event: HealthTurned, why: str, now: float) -> None:
        for trouble in self._open(event.instance_id):
            if trouble.incarnation == event.incarnation:
                trouble.end(now, f"healthy again: {why}")
            else:
                trouble.end(now, "a new process with its name registered")

    def _on_fault(self, event: FaultTurned, now: float) -> None:
        key = (event.instance_id, event.incarnation)
        if not event.level:
            if (known := self._troubles.get(key)) and not known.ended_at:
                known.end(now, "no fault is found any more")
            return
        what = f"fault of level {event.level}: {', '.join(event.reasons) or 'no reason is told'}"
        trouble = self._begin(*key, what, now)
        done = f"held back ({event.held_back})" if event.held_back else _ACTIONS.get(event.action)
        trouble.note(now, f"{what}: {done or event.action}")

    def _on_step(self, event: MemberStepped, now: float) -> None:
        near = self._near(event.instance_id, now)
        own = [trouble for trouble in near if trouble.incarnation == event.incarnation]
        replaced = self._near(event.replaces, now)[-1:]
        for trouble in [*own, *replaced]:
            trouble.step(event, now)
        # If these incidents have ended, the step may belong to one that the next verdict opens.
        if event.step == "lost" and all(trouble.ended_at for trouble in own):
            self._early.add(event.instance_id, event, now)
        if event.replaces and all(trouble.ended_at for trouble in replaced):
            self._early.add(event.replaces, event, now)
        if event.step == "serving":
            self._early.add_serving(event, now)
            self._on_successor(event, now)

    def _on_successor(self, event: MemberStepped, now: float) -> None:
        for trouble in self._troubles.values():
            if trouble.successor == event.instance_id and trouble.is_near(now):
                trouble.step(event, now)
                trouble.end_if_replaced(now)

    def _on_request(self, request: EndedRequest, now: float) -> None:
        has_failed = request.outcome == "failed"
        for instance_id in {i: None for loss in request.losses for i in loss.instance_ids}:
            at, moved, failed = self._lost.pop(instance_id, (now, 0, 0))
            if now - at > _TOGETHER_S:
                moved = failed = 0
            self._lost[instance_id] = (now, moved + (not has_failed), failed + has_failed)
            if len(self._lost) > _MAX_WAITING:
                self._lost.popitem(last=False)
            for trouble in self._near(instance_id, now)[-1:]:
                self._count(trouble)

    def _begin(self, instance_id: str, incarnation: int, cause: str, now: float) -> Trouble:
        key = (instance_id, incarnation)
        trouble = self._troubles.get(key)
        if trouble is None or trouble.ended_at:
            self._troubles.pop(key, None)
            trouble = self._troubles[key] = Trouble(instance_id, incarnation, now, cause)
            if now - self._lost.get(instance_id, (now, 0, 0))[0] <= _TOGETHER_S:
                self._count(trouble)
            for at, step in self._early.take(trouble, now):
                trouble.step(step, at)
        if len(self._troubles) > MAX_INCIDENTS:
            self._troubles.popitem(last=False)
        return trouble

    def _count(self, trouble: Trouble) -> None:
        """Add the requests that lost the instance and are not counted yet."""
        _, moved, failed = self._lost.pop(trouble.instance_id, (0.0, 0, 0))
        trouble.num_moved += moved
        trouble.num_failed += failed

    def _open(self, instance_id: str) -> list[Trouble]:
        every = self._troubles.values()
        return [t for t in every if t.instance_id == instance_id and not t.ended_at]

    def _near(self, instance_id: str, now: float) -> list[Trouble]:
        every = self._troubles.values()
        return [t for t in every if t.instance_id == instance_id and t.is_near(now)]
