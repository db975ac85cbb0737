"""Decides which of two instances that cannot connect is given up and replaced, and which ready
instances of a group have no partner of the other role.

A ready instance without a partner serves requests all the same: it computes both phases. So nothing
fails, and only a look at the group shows that no KV is handed over.
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
    """Whether `member` is given up because it and `other` did not connect in time (S16).

    `pairs` are all pairs of their group that are not connected. The one of the two that is in more
    of them is given up; if they are in equally many, the decode is. An instance that is ready is
    never given up.
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
    kv_region: str = ""  # where its KV stays; empty: anywhere

    @property
    def kind(self) -> tuple[str, str, str]:
        """Equal if a prefill and a decode of one group may exchange KV."""
        return self.model_fingerprint, self.revision, self.kv_region


def unpaired(groups: Mapping[str, Sequence[ReadyInstance]]) -> list[str]:
    """A line for each kind of instance without a partner: which two differ, and in what.

    A group that has only one of the two roles has no line.
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
    """The first instance of each kind, by its id."""
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
