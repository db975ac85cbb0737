"""Decides in which region a group of instances should be (S58).

A group's KV stays in one region unless the desired state says that the group spans regions. So all
instances of a group are in one region, normally the first that the desired state names. If that
region is lost, the group moves to the next named region that has room. When the first region has
room for the whole group again, the group moves back. Old instances that still run leave when the
new ones are ready, as in a change of revision (`leave.py`), so that requests are not interrupted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from pdmesh.core.groups.cluster_state import InstanceStatus, WantedGroup
from pdmesh.core.groups.round import GroupMember, Round
from pdmesh.core.model import Phase, Role, Stage

_LOSS_S: Final = 10.0  # when a region is lost, the leases of all its instances end within this time
_MIN_LOST: Final = 2  # instances; the loss of one is a crash, even if it is half of its region


def placed(round_: Round, group: WantedGroup) -> WantedGroup:
    """The group, with `region` set to the region that its instances should be in now."""
    return replace(group, region=None if group.spans_regions else _region_of(round_, group))


def is_misplaced(member: GroupMember, group: WantedGroup) -> bool:
    """Whether a member must leave because of its place.

    The member is outside its group's region or racks. Or its KV is bound to one region although the
    group spans regions, or the other way round.
    """
    seen, spans = member.seen, member.assignment.role_spec.spans_regions
    kept_in = seen.kv_region if seen.phase is not Phase.BLANK else _kept_in(seen, spans)
    return not is_in_place(member, group) or kept_in != _kept_in(seen, group.spans_regions)


def is_in_place(member: GroupMember, group: WantedGroup) -> bool:
    """Whether a member is in its group's region and racks, so that its leaving would make room."""
    is_in_region = group.region in (None, member.seen.region)
    return is_in_region and (not group.racks or member.seen.rack in group.racks)


def _kept_in(seen: InstanceStatus, spans_regions: bool) -> str:
    return "" if spans_regions else seen.region


def _region_of(round_: Round, group: WantedGroup) -> str:
    if len(group.regions) == 1:
        return group.regions[0]
    members = round_.members(group.group_id)
    fitting = [m for m in members if m.stage <= Stage.SERVE and not is_misplaced(m, group)]
    own: Counter[str] = Counter()  # instances by region. Each rank of a domain counts.
    for member in fitting:
        own[member.seen.region] += round_.num_ranks(member)
    serving = {r for r in own if _serves(m for m in fitting if m.seen.region == r)}
    if serving and not serving.isdisjoint(group.regions[:1] or serving):
        return group.regions[0] if group.regions else max(sorted(serving), key=own.__getitem__)
    # The places of members that leave also count as room. Otherwise the group would move to another
    # region while these members leave, and back afterwards.
    mine = [m for m in members if is_in_place(m, group) and m.instance_id not in round_.unusable]
    blanks = round_.num_blanks(group.racks)
    room = Counter(blanks)
    for member in mine:
        room[member.seen.region] += round_.num_ranks(member)
    order = group.regions or sorted(room, key=lambda r: (-own[r], -blanks[r], r)) or [""]
    with_room = (r for r in order if r in serving or room[r] >= group.num_instances)
    return next(with_room, next((r for r in order if own[r]), order[0]))


def _serves(members: Iterable[GroupMember]) -> bool:
    roles = {m.role for m in members if m.is_ready}
    alone = {Role.FUSION, Role.POOLING}
    return not alone.isdisjoint(roles) or {Role.PREFILL, Role.DECODE} <= roles


@dataclass(slots=True)
class RegionWatch:
    """Remembers which instances were lost lately, and where. Call `note` first in each round."""

    _seen: dict[str, str] = field(default_factory=dict)  # region by instance
    _lost: dict[str, tuple[str, float]] = field(default_factory=dict)  # region, time of the loss

    def note(self, seen: Mapping[str, InstanceStatus], now: float) -> None:
        gone = {i: (region, now) for i, region in self._seen.items() if i not in seen}
        lately = {i: each for i, each in self._lost.items() if now - each[1] < _LOSS_S}
        self._lost = {i: each for i, each in (lately | gone).items() if i not in seen}
        self._seen = {i: each.region for i, each in seen.items()}

    def is_losing(self, instance_id: str) -> bool:
        """Whether at least half of the instance's region was lost with it.

        If so, its assignment is not the cause of the loss.
        """
        region = self._lost.get(instance_id, ("", 0.0))[0]
        num_lost = sum(each[0] == region for each in self._lost.values())
        num_left = list(self._seen.values()).count(region)
        return bool(region) and num_lost >= max(_MIN_LOST, num_left)
