"""Decides which members of a group stay, how many it lacks, and when members advance (S14-S19).

A member advances from stage to stage: load, connect, serve. A blank instance, which has no role
yet, can become a member.
"""

from __future__ import annotations

from collections import Counter

from pdmesh.core.groups.cluster_state import WantedGroup
from pdmesh.core.groups.region import is_misplaced
from pdmesh.core.groups.round import GroupMember, Round, unverified_pairs
from pdmesh.core.model import Phase, Role, Stage


def partition_members(
    round_: Round, group: WantedGroup
) -> tuple[list[GroupMember], list[GroupMember]]:
    """The members to keep, and the others.

    The others are surplus or out of service, are in a wrong place, or have another scenario or
    revision than the group now has.
    """
    keep: list[GroupMember] = []
    others: list[GroupMember] = []
    room = dict(group.counts)
    members = [m for m in round_.members(group.group_id) if m.stage <= Stage.SERVE]
    # Keep the members that are furthest in their set-up and, among those that serve, the busiest.
    members.sort(key=lambda m: (-m.stage, not m.is_ready, -m.seen.num_slots_used, m.instance_id))
    for member in members:
        is_to_drain = member.instance_id in round_.observed.to_drain
        is_fitting = not (member.is_stale(group) or is_misplaced(member, group))
        if is_to_drain or not is_fitting or not room.get(member.role):
            others.append(member)
        else:
            room[member.role] -= 1
            keep.append(member)
    return keep, others


def lacking(group: WantedGroup, keep: list[GroupMember]) -> dict[Role, int]:
    """The number of missing members by role, in the order in which blank instances are given out.

    A role without any instance comes first, because the other role cannot serve without it.
    Encoders come last, because the group can serve without encoders.
    """
    have = Counter(m.role for m in keep)
    roles = sorted(group.counts, key=lambda role: (role is Role.ENCODER, have[role] > 0))
    return {role: group.counts[role] - have[role] for role in roles}


def advance(
    round_: Round, group: WantedGroup, keep: list[GroupMember], *, has_served: bool
) -> None:
    """Move each member of `keep` to its next stage if the condition for that stage is met.

    No member waits for the connections of members outside `keep`. These may be leaving because they
    cannot connect. No member waits for encoders, because prefills can encode images themselves
    (S130).
    """
    needed = [m for m in keep if m.role is not Role.ENCODER]
    is_gathered = len(needed) == group.size - group.counts.get(Role.ENCODER, 0)
    is_loaded = is_gathered and all(m.is_loaded for m in needed)
    pairs = unverified_pairs(keep)
    is_connected = is_loaded and not pairs and all(_is_connected(m) for m in needed)
    decodes = [m for m in keep if m.role is Role.DECODE and m.stage is Stage.SERVE]
    for member in keep:
        is_met = not any(member in pair for pair in pairs)
        match member.stage:
            case Stage.LOAD if member.is_loaded and (has_served or is_loaded):
                round_.set_stage(member, Stage.CONNECT)
            case Stage.CONNECT if not _is_connected(member) or not is_met:
                continue
            case Stage.CONNECT if not (has_served or is_connected):
                continue
            case Stage.CONNECT if member.role is Role.PREFILL:
                if decodes and all(m.is_ready for m in decodes):  # prefills last (S19)
                    round_.set_stage(member, Stage.SERVE)
            case Stage.CONNECT:
                round_.set_stage(member, Stage.SERVE)


def _is_connected(member: GroupMember) -> bool:
    return member.seen.phase in (Phase.CONNECTED, Phase.READY)
