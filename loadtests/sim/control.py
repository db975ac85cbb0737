"""The control plane on the virtual clock, over a simulated mesh that serves.

Its ratio loop, plans, schedules and upgrades are the master's own cores. These cores call each
other directly, without the code that does I/O in a real master. Only the change of a group is
different: here the simulated mesh makes the change itself, while the master uses
`core/groups/controller`. `log` has every decision and action in order. `samples` has one row per
window. Figures are drawn from these two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from loadtests.sim.live import ROLES, Group, LiveMesh
from pdmesh.core.groups.desired import Service, UpgradeLimits, revision_of
from pdmesh.core.groups.revisions import Upgrade
from pdmesh.core.model import Role
from pdmesh.core.moves.move import (
    Groups,
    GroupShape,
    Move,
    MoveKind,
    MovePlan,
)
from pdmesh.core.moves.next_move import Effect as RunnerEffect
from pdmesh.core.moves.next_move import Event as RunnerEvent
from pdmesh.core.moves.next_move import (
    GroupsSeen,
    MoveEnded,
    MoveMade,
    PlanAsked,
    PlanEnded,
    PlanRunner,
    StartMove,
)
from pdmesh.core.moves.schedule import Schedule
from pdmesh.core.ratio.bottleneck import Window
from pdmesh.core.ratio.controller import (
    AskMoves,
    OperatorAsked,
    RatioAction,
    RatioController,
    RatioDecided,
    RatioLimits,
    ScenarioProfiled,
    WindowSeen,
)
from pdmesh.core.ratio.controller import Event as RatioEvent
from pdmesh.core.ratio.throughput import Profile
from pdmesh.core.upgrade.controller import UpgradeController
from pdmesh.core.upgrade.events import (
    AnnounceUpgradeStep,
    GroupSeen,
    GroupsObserved,
    KeepRecord,
)

_TICK_S: Final = 1.0
_KV: Final = "sim"
_FIRST: Final = "r1"  # the release with which all groups begin


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the event log.

    `kind` is decided, move, scale, fault, substituted or upgrade.
    """

    at_s: float
    kind: str
    scenario: str
    text: str


@dataclass(frozen=True, slots=True)
class Sample:
    """The state of one scenario in one window."""

    at_s: float
    scenario: str
    rate_per_s: float
    window: Window | None
    groups: Mapping[str, tuple[int, int, str]]  # prefills, decodes, pool


@dataclass(slots=True)
class Control:
    """The control plane of a simulated mesh. Call `start`, then run the mesh's clock.

    Schedules need unix seconds. The run begins at `wall`, in unix seconds, and `speed` unix seconds
    pass in each second of the clock.
    """

    mesh: LiveMesh
    window_s: float
    until: float
    limits: RatioLimits = field(default_factory=RatioLimits)
    schedule: Schedule | None = None
    wall: float = 0.0
    has_ratio: bool = True
    speed: float = 1.0
    log: list[Entry] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    runner: PlanRunner = field(init=False)
    ratio: RatioController = field(init=False)
    upgrade_limits: UpgradeLimits = field(default_factory=UpgradeLimits)
    upgrades: dict[str, Upgrade] = field(default_factory=dict)
    _upgrading: UpgradeController = field(default_factory=lambda: UpgradeController(_KV))
    _releases: dict[str, str] = field(default_factory=dict)  # by scenario
    _version: int = 1
    _lost: list[tuple[Group, Role, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.runner = PlanRunner(self.limits.planner.max_busy)
        self.ratio = RatioController(self.limits)

    def start(self) -> None:
        self.mesh.watch(self.until)
        self.mesh.clock.after(_TICK_S, self._tick)
        self.mesh.clock.after(self.window_s, self._window)

    # --- acts of operators, and faults ------------------------------------------------------------

    def profile(self, scenario: str, profile: Profile) -> None:
        self._ratio(ScenarioProfiled(scenario, profile, self.mesh.states()))

    def ask(self, plan: MovePlan) -> None:
        self._ratio(OperatorAsked(plan))

    def release(self, scenario: str, release: str) -> None:
        """Give another revision to all groups of the scenario."""
        self._releases[scenario] = release
        self._version += 1

    def kill(self, group_id: str, role: Role, repaired_after_s: float) -> None:
        """Kill the role's busiest instance.

        Its machine comes back as a blank instance (one without a role) after `repaired_after_s`.
        """
        names = [n for n, r in sorted(self.mesh.groups[group_id].members.items()) if r is role]
        if not names:
            return
        workers = self.mesh.workers
        name = max(names, key=lambda n: workers[n].admission.num_slots_used)
        num_running = workers[name].admission.num_slots_used
        group, _ = self.mesh.kill(name)
        self._note("fault", group.scenario, f"{name} died with {num_running} requests")
        lost = (group, role, self.mesh.clock.now)
        self.mesh.clock.after(self.mesh.detect_s, lambda: self._lost.append(lost))
        self.mesh.clock.after(repaired_after_s, self._repaired)

    # --- the loop ---------------------------------------------------------------------------------

    def _tick(self) -> None:
        now, states = self.mesh.clock.now, self.mesh.states()
        self._substitute()
        if self.schedule is not None:
            for due in self.schedule.tick(
                self.runner.expected(states), self.wall + self.speed * now
            ):
                self._note("scale", due.entry.scenario, due.reason)
                if due.plan is not None:
                    self._run(PlanAsked(due.plan))
        self._upgrade_tick(states)
        upgrades = self.upgrades.items()
        held = frozenset(s for s, u in upgrades if u.current in self.mesh.renewing)
        self._run(GroupsSeen(states, self.mesh.num_blank, held))
        self.runner.check_invariants()
        if now + _TICK_S <= self.until:
            self.mesh.clock.after(_TICK_S, self._tick)

    def _window(self) -> None:
        mesh = self.mesh
        states = mesh.states()
        for scenario in sorted({g.scenario for g in mesh.groups.values()}):
            window, rate_per_s = mesh.window(scenario, states)
            shapes = {
                i: (s.num_prefill, s.num_decode, s.pool)
                for i, s in states.items()
                if s.scenario == scenario
            }
            self.samples.append(Sample(mesh.clock.now, scenario, rate_per_s, window, shapes))
            if self.has_ratio and not self._is_disturbed(scenario):
                seen = WindowSeen(scenario, window, states, mesh.num_blank, rate_per_s)
                self._ratio(seen)
        mesh.next_window()
        if mesh.clock.now + self.window_s <= self.until:
            mesh.clock.after(self.window_s, self._window)

    def _is_disturbed(self, scenario: str) -> bool:
        """Whether the ratio loop must ignore this window, because of an upgrade or a lost instance.

        Moves of the loop's own plans are no reason, since the loop judges each plan itself.
        """
        is_upgrading = scenario in self.upgrades and bool(self.upgrades[scenario].current)
        is_short = any(group.scenario == scenario for group, _, _ in self._lost)
        return is_upgrading or is_short or bool(self.mesh.num_loading(scenario))

    def _substitute(self) -> None:
        for lost in list(self._lost):
            if self.mesh.num_blank:
                self._lost.remove(lost)
                self.mesh.substitute(*lost[:2], lambda _, lost=lost: self._substituted(*lost))  # type: ignore[misc]

    def _substituted(self, group: Group, role: Role, since: float) -> None:
        took_s = self.mesh.clock.now - since
        text = f"a {role.value} of {group.group_id} stands in after {took_s:.0f} s"
        self._note("substituted", group.scenario, text)

    def _repaired(self) -> None:
        self.mesh.num_blank += 1

    # --- effects ----------------------------------------------------------------------------------

    def _ratio(self, event: RatioEvent) -> None:
        for effect in self.ratio.handle(event, self.mesh.clock.now):
            match effect:
                case RatioDecided():
                    self._note(
                        "decided", effect.scenario, f"{effect.action.value}: {effect.reason}"
                    )
                case AskMoves():
                    self._run(PlanAsked(effect.plan))

    def _run(self, event: RunnerEvent) -> None:
        for effect in self.runner.handle(event, self.mesh.clock.now):
            self._act(effect)

    def _act(self, effect: RunnerEffect) -> None:
        match effect:
            case StartMove():
                move, scenario = effect.move, effect.plan.scenario
                self._note("move", scenario, f"{_text(move)}: {move.reason or effect.plan.reason}")
                self.mesh.make(move, lambda is_done: self._run(MoveEnded(scenario, is_done)))
            case MoveMade(plan, move, took_s):
                if self.schedule is not None and move.kind is MoveKind.RECLAIM:
                    self.schedule.set_up_took(plan.scenario, self.speed * took_s)
            case PlanEnded():
                self._ratio(effect)

    def _upgrade_tick(self, states: Groups) -> None:
        scenarios = {group.scenario for group in self.mesh.groups.values()}
        targets = {s: Service(release=self._releases.get(s, _FIRST)) for s in scenarios}
        limits = dict.fromkeys(scenarios, self.upgrade_limits)
        seen = {i: self._seen(i, state) for i, state in states.items() if not state.pool}
        planning = frozenset(s for s in scenarios if self.runner.is_busy(s))
        look = GroupsObserved(
            self._version, targets, self.upgrades, seen, limits=limits, planning=planning
        )
        for effect in self._upgrading.handle(look, self.mesh.clock.now):
            match effect:
                case KeepRecord(upgrade):
                    self._renew(self.upgrades.get(upgrade.scenario), upgrade)
                    self.upgrades[upgrade.scenario] = upgrade
                case AnnounceUpgradeStep(scenario, step, _, group_id):
                    self._note("upgrade", scenario, f"{step} {group_id}".strip())

    def _seen(self, group_id: str, state: GroupShape) -> GroupSeen:
        group = self.mesh.groups[group_id]
        is_whole = bool(group.members) and group_id not in self.mesh.renewing
        revision = revision_of(Service(release=group.revision), _KV)
        counts = {role: state.num(role) for role in ROLES}
        busy = {role: state.busy(role) for role in ROLES}
        return GroupSeen(
            group_id, group.scenario, revision, counts, busy, is_whole, serves=bool(group.members)
        )

    def _renew(self, before: Upgrade | None, after: Upgrade) -> None:
        for group_id, group in sorted(self.mesh.groups.items()):
            if group.scenario != after.scenario or before is None:
                continue
            release = after.service_of(group_id).release
            if release != before.service_of(group_id).release:
                self.mesh.renew(group_id, release, lambda _: None)

    def _note(self, kind: str, scenario: str, text: str) -> None:
        self.log.append(Entry(self.mesh.clock.now, kind, scenario, text))


def count(log: Sequence[Entry], kind: str, text: str = "") -> int:
    return sum(entry.kind == kind and text in entry.text for entry in log)


def planned(log: Sequence[Entry]) -> list[Entry]:
    return [e for e in log if e.kind == "decided" and e.text.startswith(RatioAction.PLANNED.value)]


def _text(move: Move) -> str:
    match move.kind:
        case MoveKind.CHANGE_ROLE:
            return f"{move.group_id}: one becomes {move.role.value if move.role else ''}"
        case MoveKind.LEND:
            return f"{move.group_id} goes to {move.to_group}"
        case MoveKind.RECLAIM:
            return f"{move.group_id} comes back"
        case _:
            return f"{move.group_id}: {move.kind.value} {move.role.value if move.role else 'group'}"
