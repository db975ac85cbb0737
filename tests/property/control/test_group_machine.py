"""The group controller under any order of reports, losses, new desired states and new leaders.

These invariants are checked after every round. No group gets more instances than it wants. Prefills
and decodes of different revisions or groups never connect. No prefill accepts requests in a group
that cannot serve. The controller takes no scenario below its minimum. When the faults stop, every
group matches the desired state, and no other instance has an assignment.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from pdmesh.core.groups.controller import ForgetAssignment, GiveAssignment
from pdmesh.core.groups.desired import (
    SERVING_ROLES,
    Desired,
    Group,
    Scenario,
    Service,
)
from pdmesh.core.groups.join import partition_members
from pdmesh.core.groups.round import Round
from pdmesh.core.instance.lifecycle_events import Assigned
from pdmesh.core.model import Assignment, Phase, Role, Stage
from tests.property.control.world_machine import WorldMachine

NUM = 9
SINGLE = {"default": Scenario(allow_single=True)}
OTHER = {"other": Scenario(allow_single=True)}


def _service(release: str) -> dict[str, Service]:
    return {"default": Service(release=release)}


STATES = (
    Desired(services=_service("1"), groups={"a": Group("default", 2, 2)}),
    Desired(services=_service("2"), groups={"a": Group("default", 2, 2)}),
    Desired(services=_service("1"), scenarios=SINGLE, groups={"a": Group("default", 3, 1)}),
    Desired(services=_service("1"), scenarios=OTHER, groups={"a": Group("other", 2, 2)}),
    Desired(services=_service("1"), scenarios=OTHER,
        groups={"a": Group("other", 1, 1), "b": Group("default", 2, 2)}),
    Desired(services=_service("1"),
        groups={"a": Group("default", 2, 1), "b": Group("default", 1, 2)}),
    Desired(services=_service("2"),
        groups={"b": Group("default", 1, 1), "c": Group("default", 1, 1)}),
    Desired(services=_service("2"), groups={"c": Group("default", 0, 0, fusion=2)}),
    Desired(),
)  # fmt: skip


class GroupMachine(WorldMachine):
    NUM = NUM
    STATES = STATES

    def __init__(self) -> None:
        super().__init__()
        self.old_words: list[tuple[str, Assignment]] = []

    # --- the leader ------------------------------------------------------------------------------

    @rule(
        num_written=st.none() | st.integers(0, 3), seconds=st.sampled_from([0.5, 5.0, 25.0, 61.0])
    )
    def round(self, num_written: int | None, seconds: float) -> None:
        world = self.world
        world.now += seconds
        before, seen = dict(world.given), world.observe()
        writes = world.round(num_written)
        self._check_writes(writes, before, _with_recovered(Round(seen), writes))
        self.old_words += [
            (w.instance_id, w.assignment) for w in writes if isinstance(w, GiveAssignment)
        ]
        del self.old_words[:-20]

    # --- instances -------------------------------------------------------------------------------

    @rule(pick=st.integers(0, 19))
    def hear_late(self, pick: int) -> None:
        """Deliver an old assignment to an instance that may have newer ones."""
        if pick < len(self.old_words):
            instance_id, assignment = self.old_words[pick]
            if instance_id in self.world.processes:
                self.world._feed(instance_id, Assigned(assignment))

    # --- what must be true ------------------------------------------------------------------------

    def _check_writes(
        self,
        writes: list[GiveAssignment | ForgetAssignment],
        before: dict[str, Assignment],
        round_: Round,
    ) -> None:
        world, observed = self.world, round_.observed
        after = dict(round_.plan)
        drained: list[str] = []
        for write in writes:
            if isinstance(write, ForgetAssignment):
                record = observed.seen.get(write.instance_id)
                assert record is None or record.incarnation != before[write.instance_id].incarnation
                continue
            given, record = write.assignment, observed.seen[write.instance_id]
            assert given.incarnation == record.incarnation
            assert given.epoch == world.epoch
            was = round_.plan.get(write.instance_id)
            if was is not None:
                assert (given.role_spec, given.assignment_id) == (was.role_spec, was.assignment_id)
                assert given.stage >= was.stage
            elif given.stage is Stage.LOAD and record.assignment_id == 0:
                assert record.phase is Phase.BLANK
                assert write.instance_id not in world.out_at_once | world.to_drain
            if given.stage is Stage.DRAIN and was is not None and was.stage is Stage.SERVE:
                drained.append(write.instance_id)
            if given.stage is Stage.SERVE and was is not None and was.stage is Stage.CONNECT:
                self._check_entrance(round_, write.instance_id)
            after[write.instance_id] = given
        self._check_floors(round_, drained)
        self._check_counts(round_.plan, after)
        self._check_peers(after)

    def _check_entrance(self, round_: Round, instance_id: str) -> None:
        """Check that an instance may begin to serve (S19).

        Its pairs with all ready members of the other role that stay are verified. A prefill also
        needs a decode that already serves.
        """
        given, seen = round_.plan[instance_id], round_.observed.seen[instance_id]
        group = round_.observed.wanted.groups[given.role_spec.group_id]
        here = replace(group, region=None if group.spans_regions else seen.region)
        staying, _ = partition_members(round_, here)
        others = [member for member in staying if member.is_ready]
        if given.role_spec.role is Role.PREFILL:
            decodes = [m for m in others if m.role is Role.DECODE]
            assert decodes
            assert all(seen.id in m.seen.verified for m in decodes)
        if given.role_spec.role is Role.DECODE:
            assert all(m.seen.id in seen.verified for m in others if m.role is Role.PREFILL)

    def _check_floors(self, round_: Round, drained: list[str]) -> None:
        """Check that these drains take no role below its floor. A role below its floor loses
        nothing.
        """
        left = Round(round_.observed)
        left.plan = {i: given for i, given in round_.plan.items() if i not in drained}
        for scenario in ("default", "other"):
            before, after = round_.capacity(scenario), left.capacity(scenario)
            for role in (Role.PREFILL, Role.DECODE):
                floor = round_.observed.wanted.floor(scenario, role)
                assert after[role] >= min(floor, before[role])

    def _check_counts(self, before: dict[str, Assignment], after: dict[str, Assignment]) -> None:
        """Check that no role of a group gets more instances than the group wants."""
        groups = self.world.observe().wanted.groups
        counts: Counter[tuple[str, str, str, str, str, Role]] = Counter()
        for instance_id, given in after.items():
            if given.stage <= Stage.SERVE and instance_id not in self.world.to_drain:
                counts[self._place_of(instance_id, given)] += 1
        for instance_id in after.keys() - before.keys():
            given = after[instance_id]
            if given.stage is Stage.LOAD and self.world.records[instance_id].assignment_id == 0:
                role_spec, place = given.role_spec, self._place_of(instance_id, given)
                assert counts[place] <= groups[role_spec.group_id].counts[role_spec.role]

    def _place_of(
        self, instance_id: str, given: Assignment
    ) -> tuple[str, str, str, str, str, Role]:
        record, role_spec = self.world.records.get(instance_id), given.role_spec
        region = record.region if record is not None else ""
        kept_in = "" if role_spec.spans_regions else region
        if record is not None and record.phase is not Phase.BLANK:
            kept_in = record.kv_region
        return (
            role_spec.group_id,
            role_spec.scenario,
            role_spec.revision,
            region,
            kept_in,
            role_spec.role,
        )

    def _check_peers(self, after: dict[str, Assignment]) -> None:
        for given in after.values():
            for peer in given.peers:
                other = after.get(peer.id.instance_id)
                if other is None or other.incarnation != peer.id.incarnation:
                    continue  # an earlier round named this peer, and could not be amended
                assert {given.role_spec.role, other.role_spec.role} == {Role.PREFILL, Role.DECODE}
                assert given.role_spec.revision == other.role_spec.revision
                assert given.role_spec.group_id == other.role_spec.group_id

    @invariant()
    def instances_hold_together(self) -> None:
        if not hasattr(self, "world"):
            return
        for process in self.world.processes.values():
            process.life.check_invariants()
        for given in self.world.given.values():
            assert given.role_spec.role in SERVING_ROLES

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        for i in range(NUM):
            if f"i-{i}" not in world.processes:
                world.start(f"i-{i}")
        world.out_at_once.clear()
        world.to_drain.clear()
        world.settle()
        wanted = {
            group_id: (group.prefill, group.decode, group.fusion)
            for group_id, group in world.desired.groups.items()
        }
        assert world.counts() == wanted, world.describe()
        assert len(world.given) == sum(map(sum, wanted.values())), world.describe()
        revisions = {g.role_spec.revision for g in world.given.values()}
        assert len(revisions) == bool(wanted)
        scenarios = {g.role_spec.group_id: g.role_spec.scenario for g in world.given.values()}
        assert scenarios == {g: group.scenario for g, group in world.desired.groups.items()}


def _with_recovered(round_: Round, writes: list[GiveAssignment | ForgetAssignment]) -> Round:
    """Add the instances that still serve although the store has lost their assignments."""
    for write in writes:
        seen = round_.observed.seen.get(write.instance_id)
        if (
            not isinstance(write, GiveAssignment)
            or seen is None
            or write.instance_id in round_.plan
        ):
            continue
        if seen.phase is Phase.READY and seen.assignment_id:
            round_.plan[write.instance_id] = replace(write.assignment, stage=Stage.SERVE)
    return round_


TestGroupMachine = pytest.mark.req("S15", "S19", "S25", "S28", "S35", "S36")(GroupMachine.TestCase)
TestGroupMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
