"""Groups of data-parallel domains under any order of reports, losses and new leaders.

A domain is a set of instances, its ranks, that compute one model together. After every round of the
group controller, no two instances have the same place in a domain. A rank begins to serve only when
all ranks of its domain are connected. If a domain loses a rank, all its other ranks leave. When the
faults stop, every domain is whole, and no other instance has an assignment.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

from pdmesh.core.groups.controller import GiveAssignment
from pdmesh.core.groups.desired import Desired, Group, Scenario, Service
from pdmesh.core.model import Phase, Role, Stage
from tests.property.control.world_machine import WorldMachine

NUM = 18  # enough instances for the old and the new members of any two states
SINGLE = {"default": Scenario(allow_single=True)}


def _state(release: str, prefill: int, decode: int, group: Group) -> Desired:
    sizes = {Role.PREFILL: prefill, Role.DECODE: decode, Role.FUSION: decode}
    service = Service(release=release, dp_size={r: n for r, n in sizes.items() if n > 1})
    return Desired(services={"default": service}, scenarios=SINGLE, groups={"a": group})


STATES = (
    _state("1", 2, 2, Group("default", 2, 2)),
    _state("2", 2, 2, Group("default", 2, 2)),
    _state("1", 1, 3, Group("default", 2, 2)),
    _state("1", 3, 2, Group("default", 1, 3)),
    _state("1", 1, 3, Group("default", 0, 0, fusion=3)),
    _state("1", 1, 1, Group("default", 3, 2)),
    Desired(),
)


class DomainMachine(WorldMachine):
    NUM = NUM
    STATES = STATES

    @rule(
        num_written=st.none() | st.integers(0, 5), seconds=st.sampled_from([0.5, 5.0, 25.0, 61.0])
    )
    def round(self, num_written: int | None, seconds: float) -> None:
        world = self.world
        world.now += seconds
        records = dict(world.records)
        for write in world.round(num_written):
            if not isinstance(write, GiveAssignment) or write.assignment.stage is not Stage.SERVE:
                continue
            if (domain := write.assignment.role_spec.domain) is not None:
                self._check_all_are_connected(domain.domain_id, domain.dp_size, records)
        if num_written is None:
            self._check_broken_ones_end(records)
        places = Counter(
            (domain.domain_id, domain.dp_rank)
            for i, given in world.given.items()
            if (domain := given.role_spec.domain) is not None
            and (record := world.records.get(i)) is not None
            and record.incarnation == given.incarnation
            and given.stage < Stage.DRAIN
        )
        assert all(num == 1 for num in places.values()), places

    def _check_all_are_connected(self, domain_id: str, size: int, records: object) -> None:
        assert isinstance(records, dict)
        own = [r for r in records.values() if r.domain and r.domain.domain_id == domain_id]
        assert len(own) == size
        assert all(r.phase in (Phase.CONNECTED, Phase.READY) for r in own)

    def _check_broken_ones_end(self, records: object) -> None:
        """Check that a domain's ranks share one stage, and that a domain that lacks ranks
        drains.
        """
        assert isinstance(records, dict)
        alive: Counter[str] = Counter()
        stages: dict[str, set[Stage]] = {}
        for i, given in self.world.given.items():
            record, domain = records.get(i), given.role_spec.domain
            if domain is None or record is None or record.incarnation != given.incarnation:
                continue
            alive[domain.domain_id] += 1
            stages.setdefault(domain.domain_id, set()).add(given.stage)
            if given.stage < Stage.DRAIN:
                size = domain.dp_size
                told = sum(
                    (d := g.role_spec.domain) is not None and d.domain_id == domain.domain_id
                    for g in self.world.given.values()
                )
                assert told == size, self.world.describe()
        assert all(len(own) == 1 for own in stages.values()), self.world.describe()

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
        num = 0
        # After a rollback, the groups want the previous service again.
        for group_id, group in world.observe().wanted.groups.items():
            for role in (Role.PREFILL, Role.DECODE, Role.FUSION):
                size, wanted = group.dp_size(role), group.counts[role]
                num += size * wanted
                assert len(world.ready(group_id, role)) == size * wanted, world.describe()
                sizes = [len(ranks) for ranks in world.domains(group_id, role).values()]
                assert sizes == ([size] * wanted if size > 1 else []), world.describe()
        assert len(world.given) == num, world.describe()


TestDomainMachine = pytest.mark.req("S35", "S75", "S121")(DomainMachine.TestCase)
TestDomainMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
