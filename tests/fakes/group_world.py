"""A group controller and instances without processes, for tests of the order of events.

Instances are `InstanceLife` cores without engines. The test decides when an instance has loaded, is
connected, and has ended its requests. The registry has records and assignments, which are the
leader's orders to instances. As in JetStream, a write succeeds only if its writer has seen the
latest value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from pdmesh.core.groups.cluster_state import InstanceStatus, Observed, wanted_of
from pdmesh.core.groups.controller import ForgetAssignment, GiveAssignment, GroupController
from pdmesh.core.groups.desired import Desired, UpgradeLimits
from pdmesh.core.groups.domains.folding import folded
from pdmesh.core.groups.revisions import Upgrade
from pdmesh.core.groups.step_announcements import AnnounceStep
from pdmesh.core.groups.timeouts import StageClock, StageLimits
from pdmesh.core.instance import lifecycle_events as events
from pdmesh.core.instance.lifecycle import InstanceLife
from pdmesh.core.model import Assignment, PeerId, Phase, Role, RoleSpec, Tick
from pdmesh.core.upgrade.controller import UpgradeController
from pdmesh.core.upgrade.events import (
    AnnounceUpgradeStep,
    DropRecord,
    KeepRecord,
    MemberLost,
    RestoreVersion,
)
from pdmesh.core.upgrade.observation import Surroundings, observe
from pdmesh.core.upgrade.revision_health import LegFailureReported, RequestAnswered

KV = "kv/1"
SOAK_S = 5.0
UPGRADE = UpgradeLimits(soak_s=SOAK_S, group_timeout_s=300.0)
LIMITS = StageLimits(
    react_s=20, load_s=40, connect_s=20, serve_s=20, drain_s=40, disconnect_s=5, gather_s=30,
    cool_s=30
)  # fmt: skip


@dataclass
class Process:
    """One process. `life` is its current incarnation."""

    instance_id: str
    life: InstanceLife
    todo: list[events.Effect] = field(default_factory=list)
    region: str = ""
    rack: str = ""
    is_stopping: bool = False

    def record(self) -> InstanceStatus:
        role_spec = self.life.role_spec
        return InstanceStatus(
            self.instance_id,
            self.life.incarnation,
            Phase.DRAINING if self.is_stopping and self.life.role_spec else self.life.phase,
            role_spec.role if role_spec else Role.NONE,
            role_spec.group_id if role_spec else "",
            role_spec.scenario if role_spec else "",
            role_spec.revision if role_spec else "",
            self.life.assignment.assignment_id if self.life.assignment else 0,
            self.region,
            self.rack,
            kv_addresses=(f"{self.instance_id}:1",),
            kv_region="" if role_spec is not None and role_spec.spans_regions else self.region,
            verified=frozenset(self.life.verified_peers),
            failed=frozenset(self.life.failed_peers),
            failure=self.life.failure,
            node_id=self.rack,
            domain=role_spec.domain if role_spec else None,
            domain_address="" if role_spec else f"{self.instance_id}:2",
        )


@dataclass
class World:
    desired: Desired
    num: int = 6
    version: int = 1
    num_lent: Mapping[str, int] = field(default_factory=dict)
    epoch: int = 1
    now: float = 0.0
    controller: GroupController = field(default_factory=lambda: GroupController(StageClock(LIMITS)))
    processes: dict[str, Process] = field(default_factory=dict)
    records: dict[str, InstanceStatus] = field(default_factory=dict)
    given: dict[str, Assignment] = field(default_factory=dict)
    to_drain: set[str] = field(default_factory=set)
    out_at_once: set[str] = field(default_factory=set)
    steps: list[AnnounceStep] = field(default_factory=list)
    incarnations: int = 0
    upgrading: UpgradeController = field(default_factory=lambda: UpgradeController(KV))
    upgrades: dict[str, Upgrade] = field(default_factory=dict)
    versions: dict[int, Desired] = field(default_factory=dict)
    told: list[AnnounceUpgradeStep] = field(default_factory=list)
    lost_versions: frozenset[int] = frozenset()  # desired states that are no longer stored
    canary_share: float = 0.0  # the canary share of the next version
    busy: float | None = 0.1
    planning: frozenset[str] = frozenset()
    gathering: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        self.versions[self.version] = self.desired
        for i in range(self.num):
            self.start(f"i-{i}")

    # --- what happens to processes ----------------------------------------------------------------

    def start(self, instance_id: str, own: RoleSpec | None = None) -> None:
        self.incarnations += 1
        life, before = InstanceLife(self.incarnations, own), self.processes.get(instance_id)
        process = Process(instance_id, life)
        if before is not None:
            process.region, process.rack = before.region, before.rack
        self.processes[instance_id] = process
        self.records[instance_id] = process.record()

    def kill(self, instance_id: str) -> None:
        """Kill a process and end its lease."""
        del self.processes[instance_id]
        del self.records[instance_id]

    def stop(self, instance_id: str) -> None:
        """Ask a process to end. It drains, and ignores assignments from then on."""
        self.processes[instance_id].is_stopping = True
        self.tell(instance_id)

    def hear(self, instance_id: str) -> None:
        """Let the instance read its assignment."""
        process = self.processes.get(instance_id)
        if instance_id in self.given and process is not None and not process.is_stopping:
            self._feed(instance_id, events.Assigned(self.given[instance_id]))

    def work(self, instance_id: str, *, fails: bool = False) -> None:
        """Let the first pending work of the instance finish or fail."""
        process = self.processes.get(instance_id)
        if process is None or not process.todo:
            return
        for event in self._done(process.todo.pop(0), fails):
            self._feed(instance_id, event)

    def tell(self, instance_id: str) -> None:
        """Let the instance's record reach the registry."""
        if instance_id in self.processes:
            self.records[instance_id] = self.processes[instance_id].record()

    def _done(self, effect: events.Effect, fails: bool) -> Iterator[events.Event]:
        match effect:
            case events.LoadEngine():
                yield events.LoadFailed("LOAD_FAILED: no such file") if fails else events.Loaded()
            case events.Verify(peer):
                is_there = self._is_reachable(peer.id) and not fails
                yield (
                    events.PeerVerified(peer.id)
                    if is_there
                    else events.PeerFailed(peer.id, "silent")
                )
            case events.RefuseRequests():
                yield events.BecameIdle()

    def _is_reachable(self, peer: PeerId) -> bool:
        other = self.processes.get(peer.instance_id)
        is_same = other is not None and other.life.incarnation == peer.incarnation
        return bool(is_same and other and other.record().is_loaded)

    def _feed(self, instance_id: str, event: events.Event) -> None:
        process = self.processes[instance_id]
        for effect in process.life.handle(event, self.now):
            if isinstance(effect, events.Erase):
                self.start(instance_id)
                return
            process.todo.append(effect)
        process.life.check_invariants()

    # --- the leader -------------------------------------------------------------------------------

    def observe(self) -> Observed:
        return Observed(
            self.epoch,
            self.version,
            wanted_of(self.desired, KV, self.num_lent, self.upgrades),
            dict(self.records),
            dict(self.given),
            frozenset(self.to_drain),
            frozenset(self.out_at_once),
        )

    def round(self, num_written: int | None = None) -> list[GiveAssignment | ForgetAssignment]:
        """Run one round, of which only the first `num_written` writes succeed.

        The other writes are lost, as if the leader died or the store became unreachable.
        """
        observed = self.observe()
        effects = self.controller.handle(observed, self.now)
        self.steps += [e for e in effects if isinstance(e, AnnounceStep)]
        writes = [e for e in effects if isinstance(e, GiveAssignment | ForgetAssignment)]
        for write in writes[:num_written]:
            match write:
                case GiveAssignment(instance_id, assignment):
                    self.given[instance_id] = assignment
                case ForgetAssignment(instance_id):
                    del self.given[instance_id]
        for step in (e for e in effects if isinstance(e, AnnounceStep)):
            given = folded(observed).given.get(step.instance_id)
            if given is not None and step.step in ("lost", "failed"):
                lost = MemberLost((step.group_id, given.role_spec.revision), step.instance_id)
                self.upgrading.handle(lost, self.now)
        self._upgrade(observed)
        return writes

    def _upgrade(self, observed: Observed) -> None:
        """Run the upgrades on the state that the round observed."""
        if observed.version == 0:
            return
        around = Surroundings(
            lambda group_id, role: self.busy,
            planning=self.planning,
            gathering=self.gathering,
            canary_share=self.canary_share,
            lost_versions=self.lost_versions,
        )
        look = observe(
            self.desired, self.desired, self.upgrades, observed, self.controller.reports, around
        )
        look = replace(look, limits=dict.fromkeys(look.targets, UPGRADE))
        for effect in self.upgrading.handle(look, self.now):
            match effect:
                case KeepRecord(upgrade):
                    self.upgrades[upgrade.scenario] = upgrade
                case DropRecord(scenario):
                    del self.upgrades[scenario]
                case RestoreVersion(version, bad) if bad == self.version:
                    self.apply(self.versions[version])
                case AnnounceUpgradeStep():
                    self.told.append(effect)

    def answer(self, sick: str = "", num: int = 5) -> None:
        """Let every ready instance answer some requests. Instances of the revision `sick` also fail
        as many.
        """
        for process in self.processes.values():
            role_spec = process.life.role_spec
            if process.record().phase is Phase.READY and role_spec is not None:
                group_revision = (role_spec.group_id, role_spec.revision)
                for _ in range(num):
                    self.upgrading.handle(RequestAnswered(group_revision, 0.1, 0.01), self.now)
                    if sick and role_spec.revision == sick:
                        self.upgrading.handle(LegFailureReported(group_revision), self.now)

    def elect(self) -> None:
        """Elect another master, which knows only the contents of the registry."""
        self.epoch += 1
        self.controller = GroupController(StageClock(LIMITS))
        self.upgrading = UpgradeController(KV)

    def apply(self, desired: Desired, canary_share: float = 0.0) -> None:
        self.desired, self.canary_share = desired, canary_share
        self.version += 1
        self.versions[self.version] = desired

    # --- what a test wants ------------------------------------------------------------------------

    def settle(self, max_s: float = 3000.0, quiet_s: float = 45.0) -> None:
        """Run without faults until nothing has changed for `quiet_s`. Fails after `max_s`."""
        end, num_quiet = self.now + max_s, 0
        while num_quiet < quiet_s:
            assert self.now < end, self.describe()
            is_quiet = self.work_round()
            is_cooling = any(r.state == "failed" for r in self.controller.reports.values())
            num_quiet = num_quiet + 1 if is_quiet and not is_cooling else 0

    def work_round(self) -> bool:
        """Run one second, in which the leader gives its orders and all instances carry them out.

        Returns True if there was nothing to do.
        """
        self.now += 1
        is_quiet = not self.round()
        for instance_id in list(self.processes):
            self.hear(instance_id)
            while self.processes[instance_id].todo:
                self.work(instance_id)
            self._feed(instance_id, Tick())
            before = self.records.get(instance_id)
            self.tell(instance_id)
            is_quiet = is_quiet and self.records[instance_id] == before
        return is_quiet

    def ready(self, group_id: str, role: Role) -> list[str]:
        """The instances that accept requests as members of the group."""
        return sorted(
            p.instance_id
            for p in self.processes.values()
            if p.record().phase is Phase.READY
            and p.life.role_spec is not None
            and (p.life.role_spec.group_id, p.life.role_spec.role) == (group_id, role)
        )

    def domains(self, group_id: str, role: Role) -> dict[str, list[str]]:
        """The instances that accept requests as ranks of a domain, by domain and in the order of
        ranks.
        """
        found: dict[str, dict[int, str]] = {}
        for instance_id in self.ready(group_id, role):
            role_spec = self.processes[instance_id].life.role_spec
            if role_spec is not None and (domain := role_spec.domain) is not None:
                found.setdefault(domain.domain_id, {})[domain.dp_rank] = instance_id
        return {each: [of[r] for r in sorted(of)] for each, of in sorted(found.items())}

    def counts(self) -> dict[str, tuple[int, int, int]]:
        roles = (Role.PREFILL, Role.DECODE, Role.FUSION)
        found = {
            group_id: tuple(len(self.ready(group_id, role)) for role in roles)
            for group_id in {
                p.life.role_spec.group_id for p in self.processes.values() if p.life.role_spec
            }
        }
        return {g: (c[0], c[1], c[2]) for g, c in sorted(found.items()) if any(c)}

    def describe(self) -> str:
        lines = [f"{r}" for r in self.controller.reports.values()]
        for instance_id, process in sorted(self.processes.items()):
            given = self.given.get(instance_id)
            role_spec = given.role_spec if given else None
            lines.append(
                f"{instance_id}#{process.life.incarnation} {process.life.phase.name} "
                f"{given.stage.name if given else '-'} {role_spec.group_id if role_spec else ''} "
                f"{role_spec.role.value if role_spec else ''} "
                f"{role_spec.revision if role_spec else ''}"
            )
        return "\n".join(lines)
