"""Decides each instance's assignment so that groups match the desired state (S14-S26, S35, S36).

A group is a set of prefills and decodes that may hand KV to each other. An assignment is the
master's order to one instance: its role, its group, and how far it may go. Each round compares the
desired state with the records and assignments in the registry, and decides the next assignments. A
new leader therefore continues every workflow from the registry, and repeats no step. Between rounds
the controller remembers little: how long each stage has lasted, which instances and groups have
failed lately, and which steps it has announced. Every round follows these rules:

- A new group takes blank instances, which have no role yet, only when there are enough for all its
  members except encoders. The group begins to serve when every pair of its instances has a
  verified connection, and its prefills begin last. If the set-up fails several times, instances
  that are not ready become blank, and the set-up pauses for a while (S15, S19).
- One blank instance replaces each instance that is lost, failed or taken out at once. The other
  instances of the group keep serving (S35).
- A data-parallel domain, whose ranks compute one model together, is one member of a group. The
  `domains` package represents it as one instance during the round. The controller deals with ranks
  only when it chooses the blank instances for a new domain (S121).
- An instance leaves if it is surplus, out of service or in a wrong place, or if its group now has
  another revision (of the service's model and settings) or scenario (kind of requests). It leaves
  when its successors are ready, and only if the scenario keeps its minimum of instances. If there
  is no room for the successors, it leaves before they come (`leave.py`).
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from pdmesh.core.groups.cluster_state import InstanceStatus, Observed, WantedGroup
from pdmesh.core.groups.domains.folding import folded, is_lone_rank, unfolded
from pdmesh.core.groups.domains.forming import chosen_ranks, new_domain
from pdmesh.core.groups.join import advance, lacking, partition_members
from pdmesh.core.groups.leave import (
    GroupRecord,
    drain,
    drain_serving,
    erase,
    erase_unready,
)
from pdmesh.core.groups.region import RegionWatch, placed
from pdmesh.core.groups.round import GroupMember, Round
from pdmesh.core.groups.step_announcements import AnnounceStep, StepAnnouncer
from pdmesh.core.groups.timeouts import StageClock
from pdmesh.core.model import (
    Assignment,
    PeerId,
    Phase,
    Role,
    RoleSpec,
    Stage,
)

IDS_PER_EPOCH: Final = 1_000_000  # keeps the assignment ids of different leaders apart


class GroupState(enum.StrEnum):
    GATHERING = "gathering"  # waits for enough blank instances
    FORMING = "forming"
    SERVING = "serving"
    CHANGING = "changing"
    FAILED = "failed"
    LEAVING = "leaving"


@dataclass(frozen=True, slots=True)
class GroupReport:
    """The state of one group, for operators.

    `lacks` says which blank instances the group waits for. It is empty while any instance of the
    group leaves.
    """

    group_id: str
    state: GroupState
    detail: str = ""
    lacks: str = ""


@dataclass(frozen=True, slots=True)
class GiveAssignment:
    instance_id: str
    assignment: Assignment


@dataclass(frozen=True, slots=True)
class ForgetAssignment:
    """Remove the assignment, because the incarnation that it was written for is gone."""

    instance_id: str


Effect = GiveAssignment | ForgetAssignment | AnnounceStep


@dataclass(slots=True)
class GroupController:
    """Changes its state only in `handle`.

    Before the next round, the caller must have either written or dropped the effects of this one.
    """

    clock: StageClock = field(default_factory=StageClock)
    reports: dict[str, GroupReport] = field(default_factory=dict)
    # The region that each group should be in now. None means any region.
    regions: dict[str, str | None] = field(default_factory=dict)
    _steps: StepAnnouncer = field(default_factory=StepAnnouncer)
    _records: dict[str, GroupRecord] = field(default_factory=dict)
    _region_watch: RegionWatch = field(default_factory=RegionWatch)
    _ending: set[PeerId] = field(default_factory=set)  # processes that were asked to stop
    _last_id: int = 0
    _version: int = 0

    def handle(self, observed: Observed, now: float) -> list[Effect]:
        """Run one round. It does nothing until an operator has applied a desired state."""
        if observed.version == 0:
            return []
        registry, observed = observed, folded(observed)
        if observed.version != self._version:
            self._version = observed.version
            self._records.clear()  # the operator may have repaired the cause of the failures
        round_ = Round(observed)
        told = self._steps.begin(observed)
        self._region_watch.note(observed.seen, now)
        self._note_losses(round_, now)
        self._recover(round_)
        self._break_up(round_)
        self._adopt(round_)
        self._note_departures(round_)
        self.clock.note(round_, now)
        round_.unusable = self._unusable(round_, now)
        reports: dict[str, GroupReport] = {}
        self.regions = {}
        for group_id in self._in_order(round_):
            self._steps.group_id = group_id
            reports[group_id] = self._reconcile(round_, group_id, now)
        self.reports = dict(sorted(reports.items()))
        round_.connect_peers()
        return [*self._writes(round_, registry), *told, *self._steps.end(round_)]

    # --- changes since the last round ------------------------------------------------------------

    def _note_losses(self, round_: Round, now: float) -> None:
        """Vacate the places of instances that are gone and were not asked to leave.

        Blank instances fill these places, if there are any. If an instance is lost before it ever
        served, its assignment may have killed it, and would kill every substitute as well. So the
        loss counts as a failure of the group, unless at least half of the region's instances are
        lost with it.
        """
        # At most one failure per group, and one for its encoders: the loss of one node may take
        # several instances.
        unmade: dict[tuple[str, bool], str] = {}
        for instance_id, assignment in sorted(round_.observed.given.items()):
            if instance_id not in round_.plan and assignment.stage < Stage.DRAIN:
                role_spec = assignment.role_spec
                lost_ranks = round_.observed.lost_ranks.get(instance_id, ())
                if self._steps.lost(instance_id, assignment, ", ".join(lost_ranks)):
                    for each in lost_ranks or (instance_id,):
                        self.clock.avoid(each, now)
                    self._record(role_spec.group_id).vacate(role_spec.role, instance_id)
                    is_alone = not self._region_watch.is_losing(instance_id)
                    if assignment.stage < Stage.SERVE and is_alone:
                        is_encoder = role_spec.role is Role.ENCODER
                        unmade.setdefault((role_spec.group_id, is_encoder), instance_id)
        for (group_id, _), instance_id in unmade.items():
            self._steps.group_id = group_id
            given = round_.observed.given[instance_id]
            why = f"{instance_id} was lost while it was set up"
            self._count_failure(round_, given, why, now)

    def _break_up(self, round_: Round) -> None:
        """Make the other ranks of a domain blank if one is lost, because their engines wait for it.

        `_note_losses` has vacated the domain's place and counted the failure.
        """
        for instance_id, assignment in sorted(round_.plan.items()):
            domain = assignment.role_spec.domain
            is_lone = is_lone_rank(instance_id, assignment)
            if domain is not None and is_lone and assignment.stage is not Stage.BLANK:
                why = f"rank {domain.dp_rank} of {domain.domain_id}, which is not whole"
                self._steps.announce("broken_up", assignment, instance_id, detail=why)
                member = GroupMember(round_.observed.seen[instance_id], assignment)
                round_.set_stage(member, Stage.BLANK)

    def _note_departures(self, round_: Round) -> None:
        """Vacate the places of instances that drain because their processes were asked to stop.

        Such a departure does not count as a failure of the group (F41).
        """
        for instance_id, assignment in sorted(round_.plan.items()):
            member = GroupMember(round_.observed.seen[instance_id], assignment)
            if member.is_departing:
                self._record(assignment.role_spec.group_id).vacate(member.role, instance_id)
                round_.set_stage(member, Stage.DRAIN)
                self._ending.add(member.seen.id)

    def _unusable(self, round_: Round, now: float) -> frozenset[str]:
        """The instances that must not get a new role after leaving their groups."""
        observed = round_.observed
        self._ending &= {seen.id for seen in observed.seen.values()}
        members = (GroupMember(observed.seen[i], given) for i, given in round_.plan.items())
        hanging = {m.instance_id for m in members if self.clock.is_erase_overdue(m, now)}
        ending = {each.instance_id for each in self._ending}
        return observed.to_drain | observed.out_at_once | hanging | ending

    def _recover(self, round_: Round) -> None:
        """Rebuild assignments from the instances' records if the assignments were lost (F21)."""
        stages = {
            Phase.LOADING: Stage.LOAD,
            Phase.LOADED: Stage.LOAD,
            Phase.CONNECTING: Stage.CONNECT,
            Phase.CONNECTED: Stage.CONNECT,
            Phase.READY: Stage.SERVE,
            Phase.DRAINING: Stage.DRAIN,
            Phase.DRAINED: Stage.DRAIN,
            Phase.FAILED: Stage.BLANK,
        }
        for instance_id, seen in sorted(round_.observed.seen.items()):
            is_lost = seen.assignment_id and instance_id not in round_.plan
            if is_lost and seen.phase in stages:
                role_spec = self._role_spec_of(round_, seen)
                self._give(round_, seen, role_spec, stages[seen.phase], seen.assignment_id)

    def _adopt(self, round_: Round) -> None:
        """Adopt instances with a role from their own settings into the group that they name."""
        for instance_id, seen in sorted(round_.observed.seen.items()):
            group = round_.observed.wanted.groups.get(seen.group_id)
            is_own = seen.assignment_id == 0 and seen.phase is Phase.READY
            if not is_own or group is None or instance_id in round_.plan:
                continue
            if seen.role in group.counts and seen.scenario == group.scenario:
                role_spec = self._role_spec_of(round_, seen)
                self._give(round_, seen, role_spec, Stage.SERVE, self._next_id(round_))
                self._steps.announce("adopted", round_.plan[instance_id], instance_id)

    def _role_spec_of(self, round_: Round, seen: InstanceStatus) -> RoleSpec:
        group = round_.observed.wanted.groups.get(seen.group_id)
        if group is not None and seen.role in group.role_specs:
            role_spec = group.role_specs[seen.role]
            if (role_spec.revision, role_spec.scenario) == (seen.revision, seen.scenario):
                return replace(role_spec, domain=seen.domain)
        return RoleSpec(seen.role, seen.group_id, seen.scenario, seen.revision, domain=seen.domain)

    def _in_order(self, round_: Round) -> list[str]:
        """Sort the groups, serving ones first, since they lack instances only after a fault."""

        def rank(group_id: str) -> tuple[bool, str]:
            return (not any(m.is_ready for m in round_.members(group_id)), group_id)

        return sorted(round_.group_ids(), key=rank)

    # --- one group -------------------------------------------------------------------------------

    def _reconcile(self, round_: Round, group_id: str, now: float) -> GroupReport:
        group = round_.observed.wanted.groups.get(group_id)
        if group is not None:
            self._record(group_id).begin(group.revision)
        self._erase_broken(round_, group_id, now)
        self._finish_leaving(round_, group_id, now)
        if group is None:
            record = self._record(group_id)
            detail = drain(round_, record, round_.members(group_id), may_empty_group=True)
            return GroupReport(group_id, GroupState.LEAVING, detail)
        record, group = self._record(group_id), placed(round_, group)
        self.regions[group_id] = group.region
        keep, others = partition_members(round_, group)
        has_served = any(m.is_ready for m in keep)
        if now < record.cools_until:
            erase_unready(round_, record, keep)
            return GroupReport(group_id, GroupState.FAILED, record.failure)
        missing = lacking(group, keep)
        num_lacking = sum(missing.values())
        if now < record.encoders_cool_until:
            missing.pop(Role.ENCODER, None)
        num_short = (
            self._recruit(round_, group, missing, has_served=has_served)
            if any(missing.values())
            else 0
        )
        is_blocked = num_short > missing.get(Role.ENCODER, 0) and not has_served
        short = _short_line(num_short, group) if num_short else ""
        keep, _ = partition_members(round_, group)
        if is_blocked and self._waits_too_long(record, keep, now):
            self._fail(round_, group_id, f"set-up: {short}", now, is_final=True)
            erase_unready(round_, record, keep)
            return GroupReport(group_id, GroupState.FAILED, record.failure)
        advance(round_, group, keep, has_served=has_served)
        is_whole = not num_lacking and all(m.is_ready for m in keep)
        detail = ""
        if is_whole or short or not has_served:
            idle = [m for m in others if not m.is_ready]
            drain(round_, record, idle, may_empty_group=True)
        if is_whole or short:
            busy = [m for m in others if m.is_ready]
            detail = drain_serving(round_, group, record, busy, num_short)
        is_leaving = others or any(m.stage >= Stage.DRAIN for m in round_.members(group_id))
        report = self._report(record, group, has_served, is_whole and not others, detail or short)
        return report if is_leaving else replace(report, lacks=short)

    # --- instances that leave --------------------------------------------------------------------

    def _erase_broken(self, round_: Round, group_id: str, now: float) -> None:
        """Make failed, taken out and overdue instances blank at once, and vacate their places."""
        record = self._record(group_id)
        for member in round_.members(group_id):
            if member.stage is Stage.BLANK:
                if self.clock.is_erase_overdue(member, now):
                    self._steps.stuck(member.instance_id, member.assignment)
                continue
            if member.instance_id in round_.observed.out_at_once:
                self._steps.announce("taken_out", member.assignment, member.instance_id)
                erase(round_, record, member)
            elif why := self.clock.why_broken(round_, member, now):
                self._count_failure(round_, member.assignment, f"{member.instance_id}: {why}", now)
                for instance_id in round_.to_blame(member):
                    self.clock.avoid(instance_id, now)
                self._steps.announce("failed", member.assignment, member.instance_id, detail=why)
                erase(round_, record, member)

    def _finish_leaving(self, round_: Round, group_id: str, now: float) -> None:
        """Make instances blank that are drained and that no peer is connected to any more (S26).

        An instance that takes too long to drain becomes blank as well.
        """
        record, members = self._record(group_id), round_.members(group_id)
        for member in members:
            if member.stage is not Stage.DRAIN:
                continue
            waited_s = self.clock.waited_s(member, now)
            is_known = any(member.seen.id in m.seen.verified and m.is_ready for m in members)
            is_over = waited_s > self.clock.limits.drain_s + self.clock.limits.disconnect_s
            if is_over or (member.seen.phase is Phase.DRAINED and not is_known):
                self._steps.announce("disconnected", member.assignment, member.instance_id)
                erase(round_, record, member)

    # --- instances that come ---------------------------------------------------------------------

    def _recruit(
        self, round_: Round, group: WantedGroup, missing: dict[Role, int], *, has_served: bool
    ) -> int:
        """Give blank instances a role, and return how many are still missing.

        A group without a ready member takes instances only if there are enough for all its members
        except encoders. A domain gets all of its ranks at once, or none.
        """
        num_blank = round_.num_blanks(group.racks)
        num = num_blank.total() if group.region is None else num_blank[group.region]
        needed = sum(each * group.dp_size(role) for role, each in missing.items())
        short = max(0, needed - num)
        if not num or (short > missing.get(Role.ENCODER, 0) and not has_served):
            return short
        candidates = [s for s in round_.blanks(group.racks) if group.region in (None, s.region)]
        racks = [m.seen.rack for m in round_.members(group.group_id)]
        for role, num in missing.items():
            for _ in range(num):
                ranks = self._chosen(candidates, group.dp_size(role), racks)
                if not ranks:
                    break
                candidates = [s for s in candidates if s not in ranks]
                racks += [seen.rack for seen in ranks]
                self._assign(round_, group, role, ranks)
        return short

    def _chosen(
        self, candidates: Sequence[InstanceStatus], size: int, racks: Sequence[str]
    ) -> list[InstanceStatus]:
        """The blank instances for one new member. The list is empty if there are too few."""
        avoided = {s.instance_id for s in candidates if self.clock.is_avoided(s.instance_id)}
        if size > 1:
            return chosen_ranks(candidates, size, avoided, racks)
        return sorted(
            candidates,
            key=lambda s: (s.instance_id in avoided, racks.count(s.rack), s.instance_id),
        )[:1]

    def _assign(
        self, round_: Round, group: WantedGroup, role: Role, ranks: Sequence[InstanceStatus]
    ) -> None:
        number, role_spec = self._next_id(round_), group.role_specs[role]
        seen = ranks[0]
        if len(ranks) > 1:
            role_spec = new_domain(role_spec, number, ranks)
            seen = round_.form(role_spec, ranks)
        self._give(round_, seen, role_spec, Stage.LOAD, number)
        self._steps.announce(
            "assigned",
            round_.plan[seen.instance_id],
            seen.instance_id,
            replaces=self._record(group.group_id).fill(role),
            detail=", ".join(s.instance_id for s in ranks) if len(ranks) > 1 else "",
        )

    # --- failures and reports --------------------------------------------------------------------

    def _waits_too_long(self, record: GroupRecord, keep: list[GroupMember], now: float) -> bool:
        if not keep:
            record.short_since = None
            return False
        record.short_since = record.short_since if record.short_since is not None else now
        return now - record.short_since > self.clock.limits.gather_s

    def _count_failure(self, round_: Round, assignment: Assignment, why: str, now: float) -> None:
        """Count an instance's failure. After several failures the group's set-up pauses.

        After several failures of encoders, only the set-up of encoders pauses.
        """
        group_id = assignment.role_spec.group_id
        if assignment.role_spec.role is not Role.ENCODER:
            self._fail(round_, group_id, why, now)
            return
        record, limits = self._record(group_id), self.clock.limits
        record.num_encoder_failures += 1
        record.failure = why
        if record.num_encoder_failures >= limits.max_tries:
            record.num_encoder_failures = 0
            record.encoders_cool_until = now + limits.cool_s

    def _fail(
        self, round_: Round, group_id: str, why: str, now: float, *, is_final: bool = False
    ) -> None:
        if group_id not in round_.observed.wanted.groups:
            return
        record = self._record(group_id)
        record.num_failures += 1
        record.failure, record.short_since = why, None
        if is_final or record.num_failures >= self.clock.limits.max_tries:
            record.num_failures = 0
            record.cools_until = now + self.clock.limits.cool_s
            self._steps.announce_group("setup_failed", detail=why)

    def _report(
        self, record: GroupRecord, group: WantedGroup, has_served: bool, is_whole: bool, detail: str
    ) -> GroupReport:
        if is_whole:
            record.num_failures, record.failure, record.short_since = 0, "", None
            record.num_encoder_failures = 0
            if not record.was_complete:
                self._steps.announce_group("complete")
            state = GroupState.SERVING
        elif has_served:
            state = GroupState.CHANGING
        else:
            state = GroupState.GATHERING if detail else GroupState.FORMING
            self._steps.announce_group(state.value, detail=detail)
        record.was_complete = is_whole
        return GroupReport(group.group_id, state, detail or record.failure)

    # --- small things ----------------------------------------------------------------------------

    def _record(self, group_id: str) -> GroupRecord:
        return self._records.setdefault(group_id, GroupRecord())

    def _next_id(self, round_: Round) -> int:
        self._last_id = max(self._last_id, round_.observed.epoch * IDS_PER_EPOCH) + 1
        return self._last_id

    def _give(
        self,
        round_: Round,
        seen: InstanceStatus,
        role_spec: RoleSpec,
        stage: Stage,
        assignment_id: int,
    ) -> None:
        round_.plan[seen.instance_id] = Assignment(
            seen.incarnation, round_.observed.epoch, assignment_id, stage, role_spec
        )

    def _writes(self, round_: Round, registry: Observed) -> Iterator[Effect]:
        """The changes to write to the registry.

        This leader also rewrites unchanged assignments of an earlier leader, with its own epoch
        (the number of its leadership). After that, the earlier leader can no longer write these
        assignments (I7).
        """
        plan = unfolded(round_.plan, round_.domains)
        for instance_id in sorted(registry.given.keys() - plan.keys()):
            yield ForgetAssignment(instance_id)
        for instance_id, assignment in sorted(plan.items()):
            own = replace(assignment, epoch=registry.epoch)
            if own != registry.given.get(instance_id):
                yield GiveAssignment(instance_id, own)


def _short_line(short: int, group: WantedGroup) -> str:
    where = f" in region {group.region}" if group.region else ""
    where += f" in rack {' or '.join(group.racks)}" if group.racks else ""
    return f"{short} more blank instance{'s' if short > 1 else ''} needed{where}"
