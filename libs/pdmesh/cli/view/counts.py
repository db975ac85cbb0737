"""A short form of the numbers of instances by role in a group, such as `2P:1D`, `3F` or `2E`.

E stands for embeddings: the instances of the role pooling. V stands for vision: the encoders.
"""

from __future__ import annotations

from collections.abc import Iterable

from pdmesh.v1.common_pb2 import (
    INSTANCE_PHASE_READY,
    ROLE_DECODE,
    ROLE_ENCODER,
    ROLE_FUSION,
    ROLE_POOLING,
    ROLE_PREFILL,
    InstancePhase,
    Role,
)


def counts(prefill: int, decode: int, fusion: int, pooling: int = 0, encoder: int = 0) -> str:
    pair = f"{prefill}P:{decode}D" if prefill or decode else ""
    others = ((fusion, "F"), (pooling, "E"), (encoder, "V"))
    alone = [f"{num}{letter}" for num, letter in others if num]
    return " ".join(part for part in (pair, *alone) if part) or "-"


def ready_counts(members: Iterable[tuple[Role.ValueType, InstancePhase.ValueType]]) -> str:
    roles = [role for role, phase in members if phase == INSTANCE_PHASE_READY]
    known = (ROLE_PREFILL, ROLE_DECODE, ROLE_FUSION, ROLE_POOLING, ROLE_ENCODER)
    return counts(*(roles.count(role) for role in known))
