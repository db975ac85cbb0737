"""Decides what work an instance of a role takes at all, and how much at a time by default (S3)."""

from __future__ import annotations

from typing import Final

from pdmesh.core.instance.admission import Work
from pdmesh.core.model import Role

WORKS: Final = {
    # It does both phases (LOCAL) only while its group has no instance of the other role.
    Role.PREFILL: frozenset({Work.PREFILL, Work.LOCAL}),
    Role.DECODE: frozenset({Work.DECODE, Work.LOCAL}),
    Role.FUSION: frozenset({Work.PREFILL, Work.DECODE, Work.LOCAL}),
    Role.POOLING: frozenset({Work.POOL}),
    Role.ENCODER: frozenset({Work.ENCODE}),
}
DEFAULT_SLOTS: Final = {
    Role.PREFILL: 8, Role.DECODE: 64, Role.FUSION: 8, Role.POOLING: 16, Role.ENCODER: 8,
}  # fmt: skip


def keeps_kv(role: Role) -> bool:
    """Whether tiers have anything to keep there: pooling and encoding leave no KV."""
    return bool(WORKS[role] & {Work.PREFILL, Work.DECODE})
