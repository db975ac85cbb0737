"""A round of the group controller finds members and blank instances once for all groups."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pdmesh.core.groups.cluster_state import InstanceStatus, Observed, wanted_of
from pdmesh.core.groups.desired import (
    Desired,
)
from pdmesh.core.groups.round import Round
from pdmesh.core.model import (
    Assignment,
    Phase,
    Role,
    RoleSpec,
    Stage,
)


class CountingPlan(dict[str, Assignment]):
    """A plan that counts how many of its entries were iterated over."""

    num_looks = 0

    def __iter__(self) -> Iterator[str]:
        for key in super().__iter__():
            self.num_looks += 1
            yield key

    def items(self) -> Iterator[tuple[str, Assignment]]:  # type: ignore[override]  # as above
        return ((key, self[key]) for key in self)


def test_each_instance_is_looked_at_once_for_the_members_of_all_groups() -> None:
    num = 200
    given = {
        f"i{i}": Assignment(1, 1, i, Stage.SERVE, RoleSpec(Role.DECODE, f"g{i % 50}", "s", ""))
        for i in range(num)
    }
    seen = {i: InstanceStatus(i, 1, Phase.READY) for i in [*given, "new"]}
    round_ = Round(Observed(1, 1, wanted_of(Desired(), "ucx/1"), seen, given))
    round_.plan = plan = CountingPlan(round_.plan)
    groups = [round_.members(f"g{i}") for i in range(50)]
    assert sum(map(len, groups)) == num
    assert all(g == sorted(g, key=lambda m: m.instance_id) for g in groups)
    round_.plan["new"] = replace(given["i7"], stage=Stage.LOAD)
    assert [m.instance_id for m in round_.members("g7")] == ["i107", "i157", "i57", "i7", "new"]
    assert plan.num_looks <= 2 * num + 1


def test_blanks_are_found_once_for_all_groups_that_ask_in_vain() -> None:
    round_ = Round(Observed(1, 1, wanted_of(Desired(), "ucx/1"), {}, {}))
    assert round_.blanks() is round_.blanks()
    assert round_.num_blanks(("r1",)) is round_.num_blanks(("r1",))
