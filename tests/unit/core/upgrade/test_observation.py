"""An observation of the groups for upgrades reads each group only a few times."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from pdmesh.core.groups.cluster_state import Observed, wanted_of
from pdmesh.core.groups.desired import (
    Desired,
    Group,
    Scenario,
    problems,
)
from pdmesh.core.groups.revisions import with_canaries
from pdmesh.core.upgrade.controller import UpgradeController
from pdmesh.core.upgrade.events import KeepRecord
from pdmesh.core.upgrade.observation import Surroundings, observe


class Counting(dict[str, Group]):
    """A dict that counts how many of its entries were iterated over."""

    num_looks = 0

    def __iter__(self) -> Iterator[str]:
        for key in super().__iter__():
            self.num_looks += 1
            yield key

    def values(self) -> Iterator[Group]:  # type: ignore[override]  # as much of a view as is used
        return (self[key] for key in self)

    def items(self) -> Iterator[tuple[str, Group]]:  # type: ignore[override]  # as above
        return ((key, self[key]) for key in self)


def test_each_group_is_looked_at_a_few_times_however_many_scenarios_there_are() -> None:
    num = 300
    groups = Counting({f"g{i}": Group(f"s{i}", 2, 2) for i in range(num)})
    scenarios: Mapping[str, Scenario] = {f"s{i}": Scenario() for i in range(num)}
    desired = Desired(scenarios=scenarios, groups=groups)
    assert list(problems(desired)) == []
    wanted = wanted_of(desired, "ucx/1")
    observed = Observed(1, 1, wanted, {}, {})
    look = observe(desired, desired, {}, observed, {}, Surroundings(lambda group_id, role: None))
    kept = UpgradeController("ucx/1").handle(look, 0.0)
    assert len(kept) == num
    upgrades = [effect.upgrade for effect in kept if isinstance(effect, KeepRecord)]
    tried = {each.scenario: replace(each, canary_share=0.5) for each in upgrades}
    assert len(with_canaries(desired, tried).groups) == 2 * num
    assert groups.num_looks < 30 * num
