"""Records incidents: what went wrong with one run of a process, and what was done about it.

An incident opens when the health-monitor suspects the process or finds a fault. Later actions of
the master and the gateways become steps of the incident: the process leaves its group, another
instance takes its place, requests continue elsewhere. An incident ends in one of four ways. The
process is well again, or it has deregistered, or a new process has registered under its name, or
another instance serves in the place of a dead process.
"""

from __future__ import annotations

from collections import OrderedDict, deque
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
    successor: str = ""

    def note(self, at: float, what: str) -> None:
        if len(self.steps) < MAX_STEPS and (not self.steps or self.steps[-1][1] != what):
            self.steps.append((at, what))

    def end(self, at: float, what: str) -> None:
        self.note(at, what)
        self.ended_at = at

    def is_near(self, at: float) -> bool:
        """Whether an event at time `at` may still belong to the incident."""
        return not self.ended_at or at - self.ended_at < _TOGETHER_S


@dataclass(slots=True)
class IncidentBook:
    """All incidents. Only `handle` changes them. At the bound, the oldest incident is dropped."""

    _troubles: OrderedDict[tuple[str, int], Trouble] = field(default_factory=OrderedDict)
    # Requests often notice a death before the health-monitor does. For each lost instance: the time
    # of the last loss, and how many requests moved and failed.
    _lost: OrderedDict[str, tuple[float, int, int]] = field(default_factory=OrderedDict)
    # The master and the health-monitor publish independently, so a step may arrive before the
    # verdict that opens its incident. Such steps wait here, each with its time.
    _early: deque[tuple[float, MemberStepped]] = field(
        default_factory=lambda: deque(maxlen=_MAX_EARLY)
    )

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
            _note_step(trouble, event, now)
        if (event.step == "lost" and not own) or (event.replaces and not replaced):
            self._early.append((now, event))
        if event.step == "serving":
            self._on_successor(event.instance_id, now)

    def _on_successor(self, instance_id: str, now: float) -> None:
        what = f"{instance_id} serves in its place"
        for trouble in self._troubles.values():
            if trouble.successor == instance_id and trouble.is_near(now):
                trouble.note(now, what)
                if trouble.is_dead and not trouble.ended_at:
                    trouble.end(now, what)

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
            self._note_early_steps(trouble, now)
        if len(self._troubles) > MAX_INCIDENTS:
            self._troubles.popitem(last=False)
        return trouble

    def _note_early_steps(self, trouble: Trouble, now: float) -> None:
        for at, event in [*self._early]:
            if now - at <= _TOGETHER_S and _note_step(trouble, event, at):
                self._early.remove((at, event))

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


def _note_step(trouble: Trouble, event: MemberStepped, at: float) -> bool:
    """Add a step of the master, and return whether it is about the incident's process."""
    if (event.instance_id, event.incarnation) == (trouble.instance_id, trouble.incarnation):
        trouble.note(at, f"group {event.group_id}: {event.step.replace('_', ' ')}")
        return True
    if event.replaces == trouble.instance_id:
        trouble.successor = event.instance_id
        role = f" as {event.role}" if event.role else ""
        trouble.note(at, f"{event.instance_id} takes its place{role} in {event.group_id}")
        return True
    return False
