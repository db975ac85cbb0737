"""Defines which work an instance of a role takes, and how many slots it has by default (S3)."""

from __future__ import annotations

from typing import Final

from pdmesh.core.instance.admission import Work
from pdmesh.core.model import Role

WORKS: Final = {
    # A prefill or a decode does both phases (LOCAL) only for requests that a plan colocates: the
    # other role is gone, or no pair of instances may exchange KV (`placement/plan.py`).
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
    """Whether instances of this role have KV to keep in host memory and files.

    Pooling and encoding leave no KV.
    """
    return bool(WORKS[role] & {Work.PREFILL, Work.DECODE})
