"""Rolling upgrades: whatever happens to the groups, at most one is out, and one that turns sick goes back."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh.core.upgrade import (
    GroupSeen,
    SetRevision,
    SetShare,
    Upgrade,
    UpgradeEnded,
    UpgradeLimits,
    UpgradeState,
)

OLD, NEW = "old", "new"
LIMITS = UpgradeLimits(soak_s=30, group_timeout_s=100)


@dataclass
class Mesh:
    """Groups as their controller has them: a change of revision takes `change_s`, unless it never ends."""

    num_groups: int = 3
    busy: float | None = 0.5
    change_s: float = 40.0
    limits: UpgradeLimits = LIMITS
    sick: dict[str, str] = field(default_factory=dict)  # group -> what is wrong with NEW there
    now: float = 0.0
    groups: dict[str, GroupSeen] = field(init=False)
    upgrade: Upgrade = field(init=False)
    until: dict[str, float] = field(default_factory=dict)
    wanted: dict[str, str] = field(default_factory=dict)
    shares: dict[str, float] = field(default_factory=dict)
    ended: list[UpgradeEnded] = field(default_factory=list)

    def __post_init__(self) -> None:
        ids = [f"g{i}" for i in range(self.num_groups)]
        self.groups = {i: GroupSeen(i, OLD, True, self.busy, 0.0) for i in ids}
        self.restart()

    def restart(self) -> None:
        self.upgrade = Upgrade(NEW, dict.fromkeys(sorted(self.groups), OLD), self.limits)

    def step(self, seconds: float = 10.0) -> None:
        self.now += seconds
        for group_id, at in list(self.until.items()):
            if at <= self.now:
                self._change(group_id)
        for effect in self.upgrade.tick(self.groups, self.now):
            self._act(effect)
        self.check()

    def _change(self, group_id: str) -> None:
        wrong = self.sick.get(group_id, "") if self.wanted[group_id] == NEW else ""
        if wrong == "hangs":
            return
        del self.until[group_id]
        seen = replace(self.groups[group_id], revision=self.wanted[group_id], is_whole=True)
        if wrong == "errors":
            seen = replace(seen, error_share=0.2)
        elif wrong == "fails":
            seen = replace(seen, is_whole=False, failure="wrong model hash")
        else:
            seen = replace(seen, error_share=0.0, failure="")
        self.groups[group_id] = seen

    def _act(self, effect: SetRevision | SetShare | UpgradeEnded) -> None:
        match effect:
            case SetRevision():
                self.wanted[effect.group_id] = effect.revision
                self.until[effect.group_id] = self.now + self.change_s
                group = self.groups[effect.group_id]
                self.groups[effect.group_id] = replace(
                    group, revision="", is_whole=False, failure="", error_share=None
                )
            case SetShare():
                self.shares[effect.group_id] = effect.share
            case UpgradeEnded():
                self.ended.append(effect)

    def check(self) -> None:
        out = [g for g in self.groups.values() if not g.is_whole]
        assert len(out) <= 1, "one group at a time"
        assert self.upgrade.current is None or all(g.group_id == self.upgrade.current for g in out)

    def run(self, steps: int = 100) -> None:
        for _ in range(steps):
            self.step()

    @property
    def revisions(self) -> list[str]:
        return [g.revision for _, g in sorted(self.groups.items())]


@pytest.mark.req("S24")
def test_three_groups_are_upgraded_one_after_the_other_each_after_the_last_proved_itself() -> None:
    mesh = Mesh()
    mesh.run()
    assert mesh.revisions == [NEW] * 3
    assert mesh.ended == [UpgradeEnded(UpgradeState.DONE, 3, "")]


@pytest.mark.req("S24")
@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ("errors", "g1: 20.0% of requests failed"),
        ("fails", "g1: wrong model hash"),
        ("hangs", "g1 was not whole in time"),
    ],
)
def test_a_group_that_is_not_well_goes_back_and_the_rest_is_left_alone(
    wrong: str, reason: str
) -> None:
    mesh = Mesh(sick={"g1": wrong})
    mesh.run()
    assert mesh.revisions == [NEW, OLD, OLD]
    assert all(g.is_whole for g in mesh.groups.values())
    assert mesh.ended == [UpgradeEnded(UpgradeState.STOPPED, 1, reason)]


@pytest.mark.req("S24")
def test_a_canary_gets_its_share_until_it_has_proved_itself_or_went_back() -> None:
    canary = replace(LIMITS, canary_share=0.05)
    mesh = Mesh(limits=canary)
    mesh.step()
    assert mesh.shares == {"g0": 0.05}
    mesh.run()
    assert mesh.shares == {"g0": 1.0}
    sick = Mesh(limits=canary, sick={"g0": "errors"})
    sick.run()
    assert (sick.revisions, sick.shares) == ([OLD] * 3, {"g0": 1.0})


@pytest.mark.req("S24")
@pytest.mark.parametrize(
    ("num_groups", "busy", "why"),
    [
        (1, 0.1, "only group"),
        (3, 0.7, "2 groups would be 105% busy"),
        (3, None, "load is unknown"),
    ],
)
def test_a_group_is_not_taken_out_where_the_others_could_not_do_without(
    num_groups: int, busy: float | None, why: str
) -> None:
    mesh = Mesh(num_groups, busy)
    mesh.run()
    assert mesh.revisions == [OLD] * num_groups
    assert why in mesh.upgrade.waits_for


def test_an_operator_stops_it_and_the_group_under_way_goes_back() -> None:
    mesh = Mesh()
    mesh.step()
    for effect in mesh.upgrade.stop("not today", mesh.now):
        mesh._act(effect)
    mesh.run()
    assert mesh.revisions == [OLD] * 3
    assert mesh.ended[-1].reason == "not today"


@pytest.mark.req("S24")
@given(
    num_groups=st.integers(2, 5),
    steps=st.lists(st.floats(1, 60), min_size=5, max_size=120),
    sick=st.dictionaries(
        st.sampled_from([f"g{i}" for i in range(5)]), st.sampled_from(["errors", "fails", "hangs"])
    ),
    change_s=st.floats(1, 90),
    restarts=st.sets(st.integers(0, 120), max_size=4),
)
def test_at_most_one_group_is_out_whatever_happens_and_whoever_leads(
    num_groups: int,
    steps: list[float],
    sick: dict[str, str],
    change_s: float,
    restarts: set[int],
) -> None:
    mesh = Mesh(num_groups, 0.1, change_s, sick=sick)
    for number, seconds in enumerate(steps):
        if number in restarts and mesh.upgrade.state is UpgradeState.RUNNING:
            mesh.restart()
        mesh.step(seconds)
    mesh.run(200)
    assert mesh.ended
    assert all(g.is_whole for g in mesh.groups.values())
    for group_id in mesh.upgrade.done:
        assert mesh.groups[group_id].revision == NEW
