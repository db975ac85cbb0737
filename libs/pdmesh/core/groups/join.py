"""Decides which members of a group stay, how many it lacks, and how far each may go (S14-S19)."""

from __future__ import annotations

from collections import Counter

from pdmesh.core.groups.cluster_state import WantedGroup
from pdmesh.core.groups.region import is_misplaced
from pdmesh.core.groups.round import GroupMember, Round, unverified_pairs
from pdmesh.core.model import Phase, Role, Stage


def partition_members(
    round_: Round, group: WantedGroup
) -> tuple[list[GroupMember], list[GroupMember]]:
    """Members to keep, and the others.

    The others are surplus, of another scenario or revision, in a wrong place, or out of service.
    """
    keep: list[GroupMember] = []
    others: list[GroupMember] = []
    room = dict(group.counts)
    members = [m for m in round_.members(group.group_id) if m.stage <= Stage.SERVE]
    # Members that are furthest on leave last; of the members that serve, the busiest leave last.
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
    """Instances that are missing, by role.

    A role without any instance comes first: the other role needs it. Encoders come last: the
    group serves without them.
    """
    have = Counter(m.role for m in keep)
    roles = sorted(group.counts, key=lambda role: (role is Role.ENCODER, have[role] > 0))
    return {role: group.counts[role] - have[role] for role in roles}


def advance(
    round_: Round, group: WantedGroup, keep: list[GroupMember], *, has_served: bool
) -> None:
    """Move each member on by one stage if what it waits for has come.

    A member that should leave holds up no other: it may be draining because it cannot connect. Nor
    does an encoder, without which prefills encode images themselves (S130).
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
