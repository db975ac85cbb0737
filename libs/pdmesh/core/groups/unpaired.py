"""Finds prefills and decodes of a group that cannot exchange KV.

If two instances cannot connect while their group is set up, `is_to_blame` decides which of them is
replaced. Later, `unpaired` finds ready instances without a partner of the other role. These still
serve requests, because each computes both phases. So no request fails, and only this check shows
operators that the group hands over no KV.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pdmesh.core.groups.round import GroupMember
from pdmesh.core.kv.layout.compatibility import difference
from pdmesh.core.model import Role


def is_to_blame(
    member: GroupMember, other: GroupMember, pairs: Sequence[tuple[GroupMember, GroupMember]]
) -> bool:
    """Whether `member` is replaced because it and `other` did not connect in time (S16).

    `pairs` are all pairs of their group that are not connected. The instance that is in more of
    these pairs is replaced. If both are in equally many, the decode is replaced. But if `other` is
    ready, `member` is always replaced.
    """

    def blame(each: GroupMember) -> tuple[int, bool]:
        return sum(each in pair for pair in pairs), each.role is Role.DECODE

    return other.is_ready or blame(member) >= blame(other)


@dataclass(frozen=True, slots=True)
class ReadyInstance:
    instance_id: str
    role: Role
    model_fingerprint: str
    revision: str = ""
    kv_region: str = ""  # the region that its KV stays in. Empty means any region.

    @property
    def kind(self) -> tuple[str, str, str]:
        """A prefill and a decode of one group may exchange KV if their kinds are equal."""
        return self.model_fingerprint, self.revision, self.kv_region


def unpaired(groups: Mapping[str, Sequence[ReadyInstance]]) -> list[str]:
    """A line of text for each kind of ready instances that has no partner in its group.

    Each line names an instance of that kind and an instance of the other role, and the difference
    between the two. A group without prefills or without decodes has no lines.
    """
    lines = []
    for group_id, instances in sorted(groups.items()):
        prefills, decodes = (_by_kind(instances, role) for role in (Role.PREFILL, Role.DECODE))
        if not prefills or not decodes:
            continue
        some_prefill, some_decode = next(iter(prefills.values())), next(iter(decodes.values()))
        pairs = [(one, some_decode) for kind, one in prefills.items() if kind not in decodes]
        pairs += [(some_prefill, one) for kind, one in decodes.items() if kind not in prefills]
        lines += [f"group {group_id}: {_line(*pair)}" for pair in dict.fromkeys(pairs)]
    return lines


def _by_kind(
    instances: Sequence[ReadyInstance], role: Role
) -> dict[tuple[str, str, str], ReadyInstance]:
    """For each kind, the instance of this role with the lowest id."""
    found: dict[tuple[str, str, str], ReadyInstance] = {}
    for each in sorted(instances, key=lambda each: each.instance_id):
        if each.role is role:
            found.setdefault(each.kind, each)
    return found


def _line(prefill: ReadyInstance, decode: ReadyInstance) -> str:
    names = prefill.instance_id, decode.instance_id
    why = difference(prefill.model_fingerprint, decode.model_fingerprint, *names)
    if not why and prefill.revision != decode.revision:
        why = "they were assigned different revisions"
    return f"{names[0]} and {names[1]} exchange no KV: {why or 'their regions differ'}"
