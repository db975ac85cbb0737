"""The group controller with two regions that are lost and return, and all other events (S58).

At all times, a group's KV stays in one region unless the group spans regions. No instance gets a
role outside the regions of its group. When the faults stop, each group is whole and in one region.
If the group has a home region, it is there.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from pdmesh.core.groups.desired import Desired
from pdmesh.core.model import Assignment
from pdmesh.desired_file import read
from tests.fakes.group_world import World
from tests.property.control.test_group_machine import GroupMachine

HEAD = "regions: [eu, us]\nscenarios: {default: {allow_single: true}}\ngroups:\n"
STATES = tuple(
    read(HEAD + groups)
    for groups in (
        "  a: {prefill: 2, decode: 2, region: eu, failover: [us]}\n",
        "  a: {prefill: 2, decode: 2, region: us, failover: [eu]}\n",
        "  a: {prefill: 1, decode: 1, region: eu}\n  b: {prefill: 1, decode: 1, region: us}\n",
        "  a: {prefill: 2, decode: 1}\n  b: {prefill: 1, decode: 2}\n",
        "  a: {prefill: 3, decode: 3, spans_regions: true}\n",
    )
)
NAMES = [f"{region}-{i}" for region in ("eu", "us") for i in range(5)]
names = st.sampled_from(NAMES)


class RegionMachine(GroupMachine):
    """Replaces the inherited rules about instances. Each region has five instances."""

    @initialize(state=st.sampled_from(STATES))
    def begin(self, state: Desired) -> None:
        self.world = World(state, num=0)
        self.old_words: list[tuple[str, Assignment]] = []
        for name in NAMES:
            self.start(name)

    @rule(state=st.sampled_from(STATES))
    def apply(self, state: Desired) -> None:
        self.world.apply(state)

    @rule(instance_id=names)
    def hear(self, instance_id: str) -> None:
        self.world.hear(instance_id)

    @rule(instance_id=names, fails=st.sampled_from([False, False, False, True]))
    def work(self, instance_id: str, fails: bool) -> None:
        self.world.work(instance_id, fails=fails)

    @rule(instance_id=names)
    def tell(self, instance_id: str) -> None:
        self.world.tell(instance_id)

    @rule(instance_id=names)
    def kill(self, instance_id: str) -> None:
        if instance_id in self.world.processes:
            self.world.kill(instance_id)

    @rule(instance_id=names)
    def start(self, instance_id: str) -> None:
        self.world.start(instance_id)
        self.world.processes[instance_id].region = instance_id.partition("-")[0]
        self.world.tell(instance_id)

    @rule(region=st.sampled_from(["eu", "us"]), order=st.permutations(range(5)))
    def lose_region(self, region: str, order: list[int]) -> None:
        """Let the leases of a region's instances end one after another, with rounds in between."""
        for i in order:
            self.kill(f"{region}-{i}")
            self.round(None, 0.5)

    @rule(region=st.sampled_from(["eu", "us"]))
    def return_region(self, region: str) -> None:
        for name in NAMES:
            if name.startswith(region) and name not in self.world.processes:
                self.start(name)

    @rule(instance_id=names, is_on=st.booleans(), is_at_once=st.booleans())
    def take_out(self, instance_id: str, is_on: bool, is_at_once: bool) -> None:
        out = self.world.out_at_once if is_at_once else self.world.to_drain
        (out.add if is_on else out.discard)(instance_id)

    def _check_peers(self, after: dict[str, Assignment]) -> None:
        super()._check_peers(after)
        records, groups = self.world.records, self.world.observe().wanted.groups
        for instance_id, given in after.items():
            if instance_id not in records:
                continue
            own = records[instance_id]
            for peer in given.peers:
                other = records.get(peer.id.instance_id)
                if other is not None and other.id == peer.id:
                    assert own.kv_region == other.kv_region
            group = groups.get(given.role_spec.group_id)
            is_new = instance_id not in self.world.given
            if group is not None and group.regions and is_new and not own.assignment_id:
                assert own.region in group.regions

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        for name in NAMES:
            if name not in world.processes:
                self.start(name)
        world.out_at_once.clear()
        world.to_drain.clear()
        world.settle()
        for group_id, group in world.desired.groups.items():
            assert world.counts()[group_id] == (group.prefill, group.decode, 0), world.describe()
            own = [i for i, given in world.given.items() if given.role_spec.group_id == group_id]
            regions = {world.records[i].region for i in own}
            if group.spans_regions:
                # this group wants six instances, and each region has only five
                assert len(regions) == 2
            else:
                assert len(regions) == 1, world.describe()
                assert not group.region or regions == {group.region}, world.describe()


TestRegionMachine = pytest.mark.req("S13", "S58")(RegionMachine.TestCase)
TestRegionMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
