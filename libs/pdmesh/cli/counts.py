"""A short form of the numbers of instances by role in a group, such as `2P:1D` or `3F`."""

from __future__ import annotations

from collections.abc import Iterable

from pdmesh.v1.common_pb2 import (
    INSTANCE_PHASE_READY,
    ROLE_DECODE,
    ROLE_FUSION,
    ROLE_PREFILL,
    InstancePhase,
    Role,
)


def counts(prefill: int, decode: int, fusion: int) -> str:
    pair = f"{prefill}P:{decode}D" if prefill or decode else ""
    return " ".join(part for part in (pair, f"{fusion}F" if fusion else "") if part) or "-"


def ready_counts(members: Iterable[tuple[Role.ValueType, InstancePhase.ValueType]]) -> str:
    roles = [role for role, phase in members if phase == INSTANCE_PHASE_READY]
    return counts(*(roles.count(role) for role in (ROLE_PREFILL, ROLE_DECODE, ROLE_FUSION)))
