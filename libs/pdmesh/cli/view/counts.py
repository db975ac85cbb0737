"""Writes a group's numbers of instances by role in a short form, such as `2P:1D`, `3F` or `2E`.

P means prefill, D decode and F fusion. E (embeddings) means pooling, and V (vision) means encoder.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from pdmesh.v1.admin_service_pb2 import GroupMember
from pdmesh.v1.common_pb2 import (
    INSTANCE_PHASE_READY,
    ROLE_DECODE,
    ROLE_ENCODER,
    ROLE_FUSION,
    ROLE_POOLING,
    ROLE_PREFILL,
    Domain,
    Role,
)


def rank_text(domain: Domain) -> str:
    """The domain, the rank (from 0) and the size, such as `chat-d7 3/8`. Empty without a domain."""
    return f"{domain.domain_id} {domain.dp_rank}/{domain.dp_size}" if domain.domain_id else ""


def counts(prefill: int, decode: int, fusion: int, pooling: int = 0, encoder: int = 0) -> str:
    pair = f"{prefill}P:{decode}D" if prefill or decode else ""
    others = ((fusion, "F"), (pooling, "E"), (encoder, "V"))
    alone = [f"{num}{letter}" for num, letter in others if num]
    return " ".join(part for part in (pair, *alone) if part) or "-"


def ready_counts(members: Iterable[GroupMember]) -> str:
    """Count the ready members. A data-parallel domain counts as one, if all its ranks are ready."""
    roles: list[Role.ValueType] = []
    ranks: Counter[str] = Counter()
    for member in members:
        if member.phase != INSTANCE_PHASE_READY:
            continue
        domain_id = member.domain.domain_id
        ranks[domain_id] += 1
        if not domain_id or ranks[domain_id] == member.domain.dp_size:
            roles.append(member.role)
    known = (ROLE_PREFILL, ROLE_DECODE, ROLE_FUSION, ROLE_POOLING, ROLE_ENCODER)
    return counts(*(roles.count(role) for role in known))
