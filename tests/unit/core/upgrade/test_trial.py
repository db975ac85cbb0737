"""The trial is the time for which an upgraded group is judged."""

from __future__ import annotations

from pdmesh.core.upgrade.events import (
    GroupSeen,
    MemberLost,
)
from pdmesh.core.upgrade.trial import Trials
from tests.fakes.upgrading_world import (
    NEW,
    OLD,
    is_at,
    play,
    released,
    settled,
)


def test_a_loss_in_a_group_without_a_trial_does_not_count() -> None:
    world = settled()
    world.upgrading.handle(MemberLost(("a", OLD), "i-0"), world.now)
    world.upgrading.handle(MemberLost(("a", OLD), "i-1"), world.now)
    world.apply(released("2"))
    play(world, 120)
    assert is_at(world, NEW)


def test_a_trial_starts_when_its_group_is_whole_and_again_after_each_loss() -> None:
    trial = Trials().trial("chat", ("a", NEW), now=0.0)
    assert (trial.unwhole_since, trial.whole_since) == (0.0, None)
    for now, is_whole in ((1.0, True), (5.0, True), (6.0, False), (7.0, False), (8.0, True)):
        seen = GroupSeen("a", "chat", NEW, {}, {}, is_whole, serves=True)
        trial.note(seen, now)
        if now == 5.0:
            assert (trial.unwhole_since, trial.whole_since) == (None, 1.0)
        if now == 7.0:
            assert (trial.unwhole_since, trial.whole_since, trial.lacking_since) == (6.0, None, 6.0)
    assert (trial.whole_since, trial.lacking_since) == (8.0, None)


def test_each_scenario_has_one_trial_and_another_group_or_revision_starts_a_new_one() -> None:
    trials = Trials()
    first = trials.trial("chat", ("a", NEW), 0.0)
    assert trials.trial("chat", ("a", NEW), 1.0) is first
    trials.lost(MemberLost(("a", NEW), "i-0"))
    assert first.incidents == {"i-0": "it was lost"}
    trials.forget("chat")
    assert trials.trial("chat", ("a", NEW), 2.0).incidents == {}
    assert trials.trial("chat", ("b", NEW), 3.0).since == 3.0
