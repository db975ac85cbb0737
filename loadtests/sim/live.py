"""A simulated mesh whose groups can change while it serves: instances join, drain, change role and
die.

Changes take time, as in a real mesh. A drain lasts until the last slot is free, and a set-up lasts
`load_s`. When an instance is killed, the legs of its requests break at once. (A leg is a request's
stay on one instance.) The request core then acts as in a gateway.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Final

from loadtests.sim.mesh import MeshShape, Served, VirtualMesh, _Life
from loadtests.sim.worker import Job, Worker
from loadtests.traffic.workloads import Arrival
from pdmesh.core.model import Role
from pdmesh.core.moves.move import (
    TRAINING_POOL,
    GroupShape,
    Move,
    MoveKind,
    other,
)
from pdmesh.core.placement.fleet import InstanceRecorded, InstanceUnrecorded
from pdmesh.core.placement.policies import Weights
from pdmesh.core.ratio.bottleneck import Window
from pdmesh.core.request.events import (
    AbortLeg,
    Effect,
    LegLost,
    ReleaseTicket,
)

ROLES: Final = (Role.PREFILL, Role.DECODE)
_SAMPLE_S: Final = 1.0  # how often to sample how full decodes are


@dataclass(slots=True)
class Group:
    group_id: str
    scenario: str
    revision: str = "r1"
    pool: str = ""
    members: dict[str, Role] = field(default_factory=dict)  # instances that serve

    def num(self, role: Role) -> int:
        return sum(own is role for own in self.members.values())


@dataclass(slots=True)
class _Sums:
    """Sums over one scenario since the window began. Times are in seconds."""

    num: int = 0
    num_late: int = 0  # includes refused requests
    num_refused: int = 0
    num_arrived: int = 0
    queue_s: float = 0.0
    t_p_s: float = 0.0
    t_d_s: float = 0.0


@dataclass(slots=True)
class Totals:
    """The numbers of requests over the whole run.

    `num_failed` requests were refused or broke off. `num_late` were answered after their SLO.
    `num_migrated` were answered although an instance that worked on them died.
    """

    num: int = 0
    num_failed: int = 0
    num_late: int = 0
    num_migrated: int = 0


class LiveMesh(VirtualMesh):
    """A virtual mesh of groups that can change.

    `e2e_slo_s` has the longest time of an answer by scenario. Without it, no answer is late.
    `num_blank` instances wait for a role.
    """

    def __init__(
        self,
        shape: MeshShape,
        seed: int,
        *,
        load_s: float,
        num_blank: int = 0,
        e2e_slo_s: dict[str, float] | None = None,
        detect_s: float = 2.0,
    ) -> None:
        super().__init__(shape, "default", seed, Weights())
        self.groups: dict[str, Group] = {}
        self.load_s, self.detect_s, self.num_blank = load_s, detect_s, num_blank
        self.totals = Totals()
        self.until: float = 0.0
        self._slo = e2e_slo_s or {}
        self._sums: dict[str, _Sums] = {}
        # seconds that a prefill computed; for a decode, seconds times the used share
        self._busy_s: dict[str, float] = {}
        # The same for the last window, with the window's length.
        self._busy_before: tuple[dict[str, float], float] = ({}, 0.0)
        self._window_began = 0.0
        self._names = itertools.count()
        self._numbers = itertools.count()
        self._group_of: dict[str, str] = {}
        self._draining: dict[str, Callable[[], None]] = {}
        self.renewing: set[str] = set()
        self._loading: dict[str, int] = {}  # number of instances that are being set up, by scenario
        # the number of instances by role when a group was lent
        self._lent: dict[str, dict[Role, int]] = {}
        self._lives: dict[int, tuple[_Life, str]] = {}  # by leg: its request and its instance

    # --- orders -----------------------------------------------------------------------------------

    def set_up(self, group_id: str, scenario: str, num_prefill: int, num_decode: int) -> Group:
        """Make a group that serves at once, for the beginning of a run."""
        group = self.groups[group_id] = Group(group_id, scenario)
        for role, count in ((Role.PREFILL, num_prefill), (Role.DECODE, num_decode)):
            for _ in range(count):
                self._join(group, role)
        return group

    def watch(self, until: float) -> None:
        """Sample the decodes every second of the clock until `until`."""
        self.until = until
        self.clock.after(_SAMPLE_S, self._sample)

    def play(self, arrivals: Iterator[Arrival]) -> None:
        """Submit requests when they are due.

        Arrivals are read one after the other. So a day's requests need not be in memory at once.
        """
        arrival = next(arrivals, None)
        if arrival is not None:
            self.clock.at(arrival.at_s, lambda: self._arrive(arrival, arrivals))

    def make(self, move: Move, done: Callable[[bool], None]) -> None:
        """Carry out a move. `done` is called with the result when the groups have changed."""
        if move.role is None:
            self._make_group(move, done)
            return
        group = self.groups[move.group_id]
        match move.kind:
            case MoveKind.CHANGE_ROLE:
                self._drain(group, other(move.role), lambda: self._load(group, move.role, done))
            case MoveKind.ADD:
                self.num_blank -= 1
                self._load(group, move.role, done)
            case MoveKind.REMOVE:
                self._drain(group, move.role, lambda: self._release_blank(done))
            case MoveKind.MOVE:
                to = self.groups[move.to_group or ""]
                self._drain(group, move.role, lambda: self._load(to, move.role, done))
            case _:
                raise AssertionError(move)

    def renew(self, group_id: str, revision: str, done: Callable[[bool], None]) -> None:
        """Load another revision on all instances of a group. They do not serve during the load."""
        group = self.groups[group_id]
        counts = {role: group.num(role) for role in ROLES}

        def loaded(is_done: bool) -> None:
            self.renewing.discard(group_id)
            done(is_done)

        def drained() -> None:
            group.revision = revision
            self._load_all(group, counts, loaded)

        self.renewing.add(group_id)
        self._drain_all(group, drained)

    def kill(self, name: str) -> tuple[Group, Role]:
        """Kill an instance.

        Its record is removed after `detect_s`. The caller decides on a substitute.
        """
        worker, group = self.workers[name], self.groups[self._group_of[name]]
        role = group.members.pop(name)
        worker.kill()
        for key, (life, where) in list(self._lives.items()):
            if where == name:
                self._later(life, LegLost(key))
                del self._lives[key]
        self.clock.after(self.detect_s, lambda: self._forget(name))
        return group, role

    def substitute(self, group: Group, role: Role, done: Callable[[bool], None]) -> None:
        """Give the role to a blank instance. If there is none, `done` is called with False at
        once.
        """
        if self.num_blank < 1:
            done(False)
            return
        self.num_blank -= 1
        self._load(group, role, done)

    # --- reports ----------------------------------------------------------------------------------

    def states(self) -> dict[str, GroupShape]:
        """The groups and their load in this window.

        Until this window is half as long as the last one, the last window is included.
        """
        span = self.clock.now - self._window_began
        return {g.group_id: self._state(g, span) for _, g in sorted(self.groups.items())}

    def _state(self, group: Group, span_s: float) -> GroupShape:
        lent = self._lent.get(group.group_id)
        return GroupShape(
            group.group_id,
            group.scenario,
            lent[Role.PREFILL] if lent else group.num(Role.PREFILL),
            lent[Role.DECODE] if lent else group.num(Role.DECODE),
            self._busy(group, Role.PREFILL, span_s),
            self._busy(group, Role.DECODE, span_s),
            group.pool,
            "m",
        )

    def window(self, scenario: str, states: dict[str, GroupShape]) -> tuple[Window | None, float]:
        """The results of requests that ended in this window (None if there are none), and the rate
        of arrivals.
        """
        sums = self._sums.get(scenario, _Sums())
        span = max(1e-9, self.clock.now - self._window_began)
        if not sums.num:
            return None, sums.num_arrived / span
        own = [s for s in states.values() if s.scenario == scenario and not s.pool]
        window = Window(
            sums.num,
            sums.queue_s / sums.num,
            sums.t_p_s / sums.num,
            sums.t_d_s / sums.num,
            1 - sums.num_late / sums.num,
            _mean_busy(own, Role.PREFILL),
            _mean_busy(own, Role.DECODE),
            (sums.num - sums.num_refused) / span,
        )
        return window, sums.num_arrived / span

    def num_loading(self, scenario: str) -> int:
        return self._loading.get(scenario, 0)

    def next_window(self) -> None:
        self._sums.clear()
        self._busy_before = (self._busy_s, self.clock.now - self._window_began)
        self._busy_s = {}
        self._window_began = self.clock.now

    # --- overrides of VirtualMesh -----------------------------------------------------------------

    def scenario_of(self, arrival: Arrival) -> str:
        return arrival.scenario

    def ended(self, served: Served) -> None:
        scenario = served.arrival.scenario
        sums = self._sums.setdefault(scenario, _Sums())
        self.totals.num += 1
        sums.num += 1
        if served.is_refused:
            self.totals.num_failed += 1
            sums.num_late += 1
            sums.num_refused += 1
            sums.queue_s += self.clock.now - served.arrival.at_s
            return
        self.totals.num_migrated += served.num_migrations > 0
        sums.queue_s += max(0.0, served.ttft_s - served.prefill_s)
        sums.t_p_s += served.prefill_s
        sums.t_d_s += served.e2e_s - served.ttft_s
        if served.e2e_s > self._slo.get(scenario, served.e2e_s):
            self.totals.num_late += 1
            sums.num_late += 1

    def _act(self, life: _Life, effect: Effect) -> None:
        match effect:
            case AbortLeg(key=key) | ReleaseTicket(key=key):
                self._lives.pop(key, None)
                found = life.jobs.pop(key, None)
                if found is not None and not found[0].is_dead:
                    found[0].abort(found[1])
                    self._slot_freed(found[0])
            case _:
                super()._act(life, effect)

    def _offer(self, life: _Life, worker: Worker, job: Job) -> None:
        if worker.is_dead:
            self._later(life, LegLost(job.leg))
            return
        super()._offer(life, worker, job)
        if job.leg in life.jobs:
            self._lives[job.leg] = (life, worker.instance_id)

    def _on_first(self, life: _Life, key: int) -> None:
        if key in life.jobs:
            super()._on_first(life, key)

    def _on_taken(self, life: _Life, key: int, prefill_key: int) -> None:
        if key not in life.jobs or prefill_key not in life.jobs:
            return
        if life.jobs[key][0].is_dead or life.jobs[prefill_key][0].is_dead:
            return  # LegLost comes soon
        self._lives.pop(prefill_key, None)
        super()._on_taken(life, key, prefill_key)

    def _on_end(self, life: _Life, key: int) -> None:
        self._lives.pop(key, None)
        super()._on_end(life, key)

    def _on_computed(self, worker: Worker, job: Job, seconds: float) -> None:
        self._add_busy(worker.instance_id, seconds)
        super()._on_computed(worker, job, seconds)

    def _report(self, worker: Worker) -> None:
        if worker.instance_id in self.fleet.instances:
            super()._report(worker)
        else:
            self._reporting.discard(worker.instance_id)

    def _publish_blocks(self, worker: Worker) -> None:
        if worker.instance_id in self.fleet.instances:
            super()._publish_blocks(worker)

    def _slot_freed(self, worker: Worker) -> None:
        name = worker.instance_id
        if name in self._draining and worker.admission.num_slots_used == 0:
            self._drained(name)
        super()._slot_freed(worker)

    # --- instances --------------------------------------------------------------------------------

    def _arrive(self, arrival: Arrival, arrivals: Iterator[Arrival]) -> None:
        self._sums.setdefault(arrival.scenario, _Sums()).num_arrived += 1
        self.submit(next(self._numbers), arrival)
        self.served.clear()  # requests are counted when they end
        self.play(arrivals)

    def _join(self, group: Group, role: Role) -> None:
        name = f"{group.group_id}-{role.value}-{next(self._names)}"
        self.add(name, role, group.group_id, group.scenario)
        group.members[name] = role
        self._group_of[name] = group.group_id

    def _load(self, group: Group, role: Role | None, done: Callable[[bool], None]) -> None:
        assert role is not None

        def loaded() -> None:
            self._loading[group.scenario] -= 1
            self._join(group, role)
            done(True)

        self._loading[group.scenario] = self.num_loading(group.scenario) + 1

        self.clock.after(self.load_s, loaded)

    def _load_all(
        self, group: Group, counts: dict[Role, int], done: Callable[[bool], None]
    ) -> None:
        def loaded() -> None:
            for role, count in counts.items():
                for _ in range(count):
                    self._join(group, role)
            done(True)

        self.clock.after(self.load_s, loaded)

    def _drain(self, group: Group, role: Role, drained: Callable[[], None]) -> None:
        """Drain the role's instance that uses the fewest slots."""
        own = [name for name, each in group.members.items() if each is role]
        self._drain_one(
            min(own, key=lambda n: (self.workers[n].admission.num_slots_used, n)), drained
        )

    def _drain_one(self, name: str, drained: Callable[[], None]) -> None:
        del self.groups[self._group_of[name]].members[name]
        identity = self.fleet.instances[name].identity
        self.fleet.handle(InstanceRecorded(replace(identity, is_draining=True)), self.clock.now)
        self._draining[name] = drained
        self.clock.after(self.shape.hop_s * 4, lambda: self._close(name))

    def _close(self, name: str) -> None:
        """Refuse new jobs. By now, gateways have tried all plans that were made before the
        drain.
        """
        worker = self.workers[name]
        worker.admission.drain(True)
        if name in self._draining and worker.admission.num_slots_used == 0:
            self._drained(name)

    def _drained(self, name: str) -> None:
        told = self._draining.pop(name)
        self.workers[name].kill()
        self._forget(name)
        told()

    def _drain_all(self, group: Group, drained: Callable[[], None]) -> None:
        """Drain a whole group.

        Prefills and decodes drain together, since prompts under way need decodes.
        """
        left = set(group.members)
        if not left:
            drained()

        def one(name: str) -> None:
            left.discard(name)
            if not left:
                drained()

        for name, role in list(group.members.items()):
            if role is Role.PREFILL:
                self._drain_one(name, lambda name=name: one(name))  # type: ignore[misc]
        decodes = [name for name, role in group.members.items() if role is Role.DECODE]
        prefills = left - set(decodes)

        def close_decodes() -> None:
            if left & prefills:
                self.clock.after(_SAMPLE_S, close_decodes)
                return
            for name in decodes:
                if name in group.members:
                    self._drain_one(name, lambda name=name: one(name))  # type: ignore[misc]
                else:
                    one(name)  # the instance died before it was drained

        close_decodes()

    def _release_blank(self, done: Callable[[bool], None]) -> None:
        self.num_blank += 1
        done(True)

    def _make_group(self, move: Move, done: Callable[[bool], None]) -> None:
        match move.kind:
            case MoveKind.LEND:
                group = self.groups[move.group_id]
                group.pool = move.to_group or TRAINING_POOL
                self._lent[group.group_id] = {role: group.num(role) for role in ROLES}
                self._drain_all(group, lambda: done(True))
            case MoveKind.RECLAIM:
                group = self.groups[move.group_id]

                def back(is_done: bool) -> None:
                    group.pool = ""
                    del self._lent[group.group_id]
                    done(is_done)

                self._load_all(group, self._lent[group.group_id], back)
            case _:
                raise AssertionError(move)

    def _forget(self, name: str) -> None:
        self.fleet.handle(InstanceUnrecorded(name), self.clock.now)
        self.index.remove_instance(name)

    # --- load -------------------------------------------------------------------------------------

    def _sample(self) -> None:
        for group in self.groups.values():
            for name, role in group.members.items():
                if role is Role.DECODE:
                    admission = self.workers[name].admission
                    capacity = admission.capacity
                    slots = admission.num_slots_used / capacity.num_slots
                    blocks = 1 - admission.num_blocks_free / capacity.num_blocks
                    self._add_busy(name, _SAMPLE_S * max(slots, blocks))
        if self.clock.now + _SAMPLE_S <= self.until:
            self.clock.after(_SAMPLE_S, self._sample)

    def _add_busy(self, name: str, seconds: float) -> None:
        self._busy_s[name] = self._busy_s.get(name, 0.0) + seconds

    def _busy(self, group: Group, role: Role, span_s: float) -> float | None:
        own = [name for name, each in group.members.items() if each is role]
        before, before_s = self._busy_before
        if span_s >= before_s / 2:
            before, before_s = {}, 0.0
        total_s = (span_s + before_s) * len(own)
        if not total_s:
            return None
        busy_s = sum(self._busy_s.get(name, 0.0) + before.get(name, 0.0) for name in own)
        return min(1.0, busy_s / total_s)


def _mean_busy(groups: list[GroupShape], role: Role) -> float | None:
    known = [(busy, g.num(role)) for g in groups if (busy := g.busy(role)) is not None]
    count = sum(num for _, num in known)
    return sum(busy * num for busy, num in known) / count if count else None
