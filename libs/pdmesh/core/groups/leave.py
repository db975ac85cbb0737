"""Decides which instances of a group leave, and when (S26, S28, S31).

A group is a set of instances that may hand KV to each other. A revision is a name for the model and
the settings that they run. Serving instances with an old revision or in a wrong place normally
leave when their successors are ready. Blank instances, which have no role yet, become the
successors. If there are too few blank instances, some serving instances leave first and become
blank:

- Surplus instances leave one at a time. The next one leaves when the one before serves in its new
  place.
- If instances have an old revision or scenario, enough of them leave at once to make room for the
  successors. The same rule applies to instances whose KV may cross regions although their group's
  KV may not, or vice versa.
- An instance in a wrong region or rack does not leave first, because it would make no room.

`core.upgrade.controller` decides which group gets another revision, and when.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from pdmesh.core.groups.cluster_state import WantedGroup
from pdmesh.core.groups.region import is_in_place, is_misplaced
from pdmesh.core.groups.round import GroupMember, Round
from pdmesh.core.model import Phase, Role, Stage

MAX_VACANCIES: Final = 64  # per role of a group; older vacancies are forgotten


@dataclass(slots=True)
class GroupRecord:
    """The controller's memory of one group between rounds, which is not in the registry."""

    revision: str = ""  # the revision that had these failures
    num_failures: int = 0
    failure: str = ""
    cools_until: float = 0.0
    num_encoder_failures: int = 0
    encoders_cool_until: float = 0.0  # until this time the group gets no new encoders
    short_since: float | None = None
    was_complete: bool = False
    # By role: the ids of the instances that have left a place which is still vacant.
    vacancies: dict[Role, deque[str]] = field(default_factory=dict)

    def begin(self, revision: str) -> None:
        """Forget the failures of another revision."""
        if self.revision != revision:
            self.revision, self.num_failures, self.failure = revision, 0, ""
            self.cools_until, self.short_since = 0.0, None
            self.num_encoder_failures, self.encoders_cool_until = 0, 0.0

    def vacate(self, role: Role, instance_id: str) -> None:
        self.vacancies.setdefault(role, deque(maxlen=MAX_VACANCIES)).append(instance_id)

    def fill(self, role: Role) -> str:
        waiting = self.vacancies.get(role)
        return waiting.popleft() if waiting else ""


def erase(round_: Round, record: GroupRecord, member: GroupMember) -> None:
    """Make the member blank. Its place becomes vacant unless it was leaving."""
    if member.stage < Stage.DRAIN:
        record.vacate(member.role, member.instance_id)
    round_.set_stage(member, Stage.BLANK)


def erase_unready(round_: Round, record: GroupRecord, members: list[GroupMember]) -> None:
    """Make all members blank that are not ready, so that no half-formed group remains."""
    for member in members:
        if not member.is_ready and member.stage <= Stage.SERVE:
            erase(round_, record, member)


def drain(
    round_: Round, record: GroupRecord, members: list[GroupMember], *, may_empty_group: bool
) -> str:
    """Drain the members that may leave. Returns the reason why another one must stay, or "".

    Members that are not ready become blank without draining.
    """
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


def drain_serving(
    round_: Round,
    group: WantedGroup,
    record: GroupRecord,
    others: list[GroupMember],
    num_short: int,
) -> str:
    """Drain serving instances that should not stay. Returns why some must stay for now, or "".

    `num_short` is the number of blank instances that are missing for successors.
    """
    unfit = [m for m in others if _is_unfit(m, group)]
    if unfit and not num_short:
        return drain(round_, record, unfit, may_empty_group=True)
    in_the_way = [m for m in unfit if is_in_place(m, group)]
    reason = _make_room(round_, group, in_the_way, num_short) if in_the_way else ""
    surplus = [m for m in others if not _is_unfit(m, group)]
    is_busy = any(_is_changing(m, round_) for m in round_.members(group.group_id))
    for member in sorted(surplus, key=lambda m: m.seen.num_slots_used):
        if is_busy:
            return "one instance changes at a time"
        may_empty = group.counts.get(member.role, 0) == 0
        reason = drain(round_, record, [member], may_empty_group=may_empty)
        is_busy = not reason
    return reason


def _is_changing(member: GroupMember, round_: Round) -> bool:
    """Whether the member drains, or is set up and does not serve yet."""
    is_coming = not member.is_ready and member.instance_id not in round_.unusable
    return member.stage is Stage.DRAIN or is_coming


def _is_unfit(member: GroupMember, group: WantedGroup) -> bool:
    return member.is_stale(group) or is_misplaced(member, group)


def _make_room(round_: Round, group: WantedGroup, unfit: list[GroupMember], num_short: int) -> str:
    """Drain enough unfit instances to make up for the missing blank instances.

    If too few may leave, none is drained, because the successors need all of the room. Returns the
    reason in this case, or an empty text.
    """
    seen = round_.observed.seen
    leaving = (
        GroupMember(seen[instance_id], given)
        for instance_id, given in round_.plan.items()
        if given.stage >= Stage.DRAIN and instance_id not in round_.unusable
    )
    num_leaving = sum(round_.num_ranks(m) for m in leaving if is_in_place(m, group))
    num_needed, before, reason = num_short - num_leaving, dict(round_.plan), ""
    for member in _in_pairs(unfit):
        if num_needed <= 0:
            return ""
        if why := round_.why_not_leave(member, may_empty_group=True):
            reason = why
            continue
        round_.set_stage(member, Stage.DRAIN)
        num_needed -= round_.num_ranks(member)
    if num_needed > 0:
        round_.plan = before
        more = "instance" if num_needed == 1 else "instances"
        return reason or f"{num_needed} more blank {more} needed, or a smaller group"
    return ""


def _in_pairs(members: list[GroupMember]) -> list[GroupMember]:
    """Sort by load, the least busy first, with alternating roles.

    If the first of them leave, the rest still have both roles and can serve.
    """
    ranks: dict[str, int] = {}
    for role in {m.role for m in members}:
        own = sorted((m for m in members if m.role is role), key=lambda m: m.seen.num_slots_used)
        ranks.update({m.instance_id: rank for rank, m in enumerate(own)})
    return sorted(members, key=lambda m: (ranks[m.instance_id], m.role.value, m.instance_id))
