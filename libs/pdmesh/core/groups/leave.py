"""Which instances of a group leave, and when: what a round of the group controller does about those that are not to stay (S26, S28, S31).

Those that serve leave when those that come are ready. Where there are too few blank instances for that, they make room first: one
at a time if they are too many, and as many as are needed if they are of an old revision or scenario, or if their KV crosses regions
and their group's is to stay in one (or the other way round). What is in another region or rack makes no room by leaving. Which group
gets another revision when is not decided here (`core.upgrade.controller`).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from pdmesh.core.groups.facts import WantedGroup
from pdmesh.core.groups.region import is_in_place, is_misplaced
from pdmesh.core.groups.round import GroupMember, Round
from pdmesh.core.model import Phase, Role, Stage

MAX_VACANCIES: Final = 64  # of a role in a group, whose substitutes are named


@dataclass(slots=True)
class GroupRecord:
    """What is remembered of a group beyond the registry."""

    revision: str = ""  # that the failures are about
    num_failures: int = 0
    failure: str = ""
    cools_until: float = 0.0
    short_since: float | None = None
    was_complete: bool = False
    vacancies: dict[Role, deque[str]] = field(default_factory=dict)

    def begin(self, revision: str) -> None:
        """What failed with another revision says nothing about this one."""
        if self.revision != revision:
            self.revision, self.num_failures, self.failure = revision, 0, ""
            self.cools_until, self.short_since = 0.0, None

    def vacate(self, role: Role, instance_id: str) -> None:
        self.vacancies.setdefault(role, deque(maxlen=MAX_VACANCIES)).append(instance_id)

    def fill(self, role: Role) -> str:
        waiting = self.vacancies.get(role)
        return waiting.popleft() if waiting else ""


def erase(round_: Round, record: GroupRecord, member: GroupMember) -> None:
    """It becomes blank; if it was not leaving, somebody is to take its place."""
    if member.stage < Stage.DRAIN:
        record.vacate(member.role, member.instance_id)
    round_.set_stage(member, Stage.BLANK)


def abandon(round_: Round, record: GroupRecord, members: list[GroupMember]) -> None:
    """Nothing half-made stays: what is not ready yet becomes blank."""
    for member in members:
        if not member.is_ready and member.stage <= Stage.SERVE:
            erase(round_, record, member)


def let_go(
    round_: Round, record: GroupRecord, members: list[GroupMember], *, may_empty_group: bool
) -> str:
    """Drain them, as far as it may be; why it may not."""
    reason = ""
    for member in members:
        if member.stage >= Stage.DRAIN:
            continue
        if why := round_.why_not_leave(member, may_empty_group=may_empty_group):
            reason = why
        elif member.seen.phase is Phase.READY:
            round_.set_stage(member, Stage.DRAIN)
        else:
            erase(round_, record, member)
    return reason


def release_leavers(
    round_: Round,
    group: WantedGroup,
    record: GroupRecord,
    others: list[GroupMember],
    num_short: int,
) -> str:
    """Of a group's instances that serve and are not to stay; why they may not go. `num_short`: those to come that there is no room for."""
    unfit = [m for m in others if _is_unfit(m, group)]
    if unfit and not num_short:
        return let_go(round_, record, unfit, may_empty_group=True)
    in_the_way = [m for m in unfit if is_in_place(m, group)]
    reason = _make_room(round_, group, in_the_way, num_short) if in_the_way else ""
    surplus = [m for m in others if not _is_unfit(m, group)]
    is_busy = any(m.stage is Stage.DRAIN for m in round_.members(group.group_id))
    for member in sorted(surplus, key=lambda m: m.seen.num_slots_used):
        if is_busy:
            return "one instance leaves at a time"
        may_empty = group.counts.get(member.role, 0) == 0
        reason = let_go(round_, record, [member], may_empty_group=may_empty)
        is_busy = not reason
    return reason


def _is_unfit(member: GroupMember, group: WantedGroup) -> bool:
    return member.is_stale(group) or is_misplaced(member, group)


def _make_room(round_: Round, group: WantedGroup, unfit: list[GroupMember], num_short: int) -> str:
    """As many of those that are not to stay as are needed, or none if not all of these may go: half the room would be of no use."""
    seen = round_.observed.seen
    num_leaving = sum(
        given.stage >= Stage.DRAIN and is_in_place(GroupMember(seen[instance_id], given), group)
        for instance_id, given in round_.plan.items()
        if instance_id not in round_.spent
    )
    num_needed, before, reason = num_short - num_leaving, dict(round_.plan), ""
    for member in _in_pairs(unfit):
        if num_needed <= 0:
            return ""
        if why := round_.why_not_leave(member, may_empty_group=True):
            reason = why
            continue
        round_.set_stage(member, Stage.DRAIN)
        num_needed -= 1
    if num_needed > 0:
        round_.plan = before
        more = "instance" if num_needed == 1 else "instances"
        return reason or f"{num_needed} more blank {more} needed, or a smaller group"
    return ""


def _in_pairs(members: list[GroupMember]) -> list[GroupMember]:
    """The least busy first, of each role in turn: what is left can serve."""
    ranks: dict[str, int] = {}
    for role in {m.role for m in members}:
        own = sorted((m for m in members if m.role is role), key=lambda m: m.seen.num_slots_used)
        ranks.update({m.instance_id: rank for rank, m in enumerate(own)})
    return sorted(members, key=lambda m: (ranks[m.instance_id], m.role.value, m.instance_id))
