"""Decides in which region a group is: where it serves, or where there is room for all of it (S58).

A group's KV stays in one region unless the desired state says that the group spans regions. So all
of the group is in one region: the first that the file names. If that region is lost, the group goes
to the next region that has room. It goes back when the first region has room for all of it again.
Instances in the other region leave when the new ones are ready, as for another revision
(`leave.py`). So nothing is interrupted, and a region that returns gets requests when all of the
group is there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from pdmesh.core.groups.cluster_state import InstanceStatus, WantedGroup
from pdmesh.core.groups.round import GroupMember, Round
from pdmesh.core.model import Phase, Role, Stage

_LOSS_S: Final = 10.0  # when a region is lost, the leases in it end within this time
_MIN_LOST: Final = 2  # instances: the loss of one is a crash, even if it is half of its region


def placed(round_: Round, group: WantedGroup) -> WantedGroup:
    """The group with the region that its instances should be in now; None: any."""
    return replace(group, region=None if group.spans_regions else _region_of(round_, group))


def is_misplaced(member: GroupMember, group: WantedGroup) -> bool:
    """Whether it is outside its group's region or racks, or its KV is bound to another region."""
    seen, spans = member.seen, member.assignment.role_spec.spans_regions
    kept_in = seen.kv_region if seen.phase is not Phase.BLANK else _kept_in(seen, spans)
    return not is_in_place(member, group) or kept_in != _kept_in(seen, group.spans_regions)


def is_in_place(member: GroupMember, group: WantedGroup) -> bool:
    """Whether it is in its group's region and racks, so that its place counts as room there."""
    is_in_region = group.region in (None, member.seen.region)
    return is_in_region and (not group.racks or member.seen.rack in group.racks)


def _kept_in(seen: InstanceStatus, spans_regions: bool) -> str:
    return "" if spans_regions else seen.region


def _region_of(round_: Round, group: WantedGroup) -> str:
    if len(group.regions) == 1:
        return group.regions[0]
    members = round_.members(group.group_id)
    fitting = [m for m in members if m.stage <= Stage.SERVE and not is_misplaced(m, group)]
    own: Counter[str] = Counter()  # instances, not members: a domain has several
    for member in fitting:
        own[member.seen.region] += round_.num_ranks(member)
    serving = {r for r in own if _serves(m for m in fitting if m.seen.region == r)}
    if serving and not serving.isdisjoint(group.regions[:1] or serving):
        return group.regions[0] if group.regions else max(sorted(serving), key=own.__getitem__)
    # Members that leave count as room, too: else the group would go elsewhere while they make room,
    # and back afterwards.
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
    """Which instances were lost with their region. Call `note` first in each round."""

    _seen: dict[str, str] = field(default_factory=dict)  # region by instance
    _lost: dict[str, tuple[str, float]] = field(default_factory=dict)  # region, lost when

    def note(self, seen: Mapping[str, InstanceStatus], now: float) -> None:
        gone = {i: (region, now) for i, region in self._seen.items() if i not in seen}
        lately = {i: each for i, each in self._lost.items() if now - each[1] < _LOSS_S}
        self._lost = {i: each for i, each in (lately | gone).items() if i not in seen}
        self._seen = {i: each.region for i, each in seen.items()}

    def is_losing(self, instance_id: str) -> bool:
        """Whether half of its region or more was lost with it: its assignment is not to blame."""
        region = self._lost.get(instance_id, ("", 0.0))[0]
        num_lost = sum(each[0] == region for each in self._lost.values())
        num_left = list(self._seen.values()).count(region)
        return bool(region) and num_lost >= max(_MIN_LOST, num_left)
