"""The groups that an upgrade counts: those that only lack instances, and those that serve."""

from __future__ import annotations

from dataclasses import replace

from pdmesh.core.groups.revisions import canary_of
from pdmesh.core.model import Role
from pdmesh.core.upgrade.events import GroupSeen, GroupsObserved

COUNTS = {Role.PREFILL: 2, Role.DECODE: 1}
BROKEN = GroupSeen("a", "chat", "r1", COUNTS, {}, is_whole=False, serves=True)


def test_a_group_lacks_instances_if_only_that_keeps_it_from_being_whole() -> None:
    assert BROKEN.num_instances == 3
    assert BROKEN.is_lacking
    assert not replace(BROKEN, is_whole=True).is_lacking
    assert not replace(BROKEN, num_blank=1).is_lacking
    assert not replace(BROKEN, failure="LOAD_FAILED").is_lacking


def test_the_canary_group_is_not_among_the_groups_to_upgrade() -> None:
    names = ("b", canary_of("chat"), "a")
    groups = {name: replace(BROKEN, group_id=name) for name in names}
    groups["other"] = replace(BROKEN, group_id="other", scenario="code")
    observed = GroupsObserved(1, {}, {}, groups)
    assert [g.group_id for g in observed.serving("chat")] == ["a", "b"]
    assert observed.serving("none") == []
