"""Converts the master's assignments between protobuf and the core's types.

An assignment is the leader's order to one instance: its role, its peers, and how far it may go (its
stage). A domain is a set of instances that compute one model together, and each of them has a rank.
"""

from __future__ import annotations

from typing import Final

from pdmesh.core.model import (
    Assignment,
    DomainRank,
    Peer,
    PeerId,
    Role,
    RoleSpec,
    Stage,
)
from pdmesh.errors import InvalidRequest
from pdmesh.v1 import common_pb2, groups_pb2
from pdmesh.v1.common_pb2 import (
    ROLE_DECODE,
    ROLE_ENCODER,
    ROLE_FUSION,
    ROLE_NONE,
    ROLE_POOLING,
    ROLE_PREFILL,
)

ROLES: Final = {
    ROLE_NONE: Role.NONE,
    ROLE_PREFILL: Role.PREFILL,
    ROLE_DECODE: Role.DECODE,
    ROLE_FUSION: Role.FUSION,
    ROLE_POOLING: Role.POOLING,
    ROLE_ENCODER: Role.ENCODER,
}
TO_PROTO: Final = {role: number for number, role in ROLES.items()}


def assignment_from(m: groups_pb2.Assignment) -> Assignment:
    """Raises InvalidRequest for an unknown stage or role, or an impossible rank of a domain."""
    try:
        stage = Stage(m.stage)
    except ValueError:
        raise InvalidRequest(f"unknown stage {m.stage}", field="stage") from None
    return Assignment(
        incarnation=m.incarnation,
        epoch=m.epoch,
        assignment_id=m.assignment_id,
        stage=stage,
        role_spec=RoleSpec(
            role=_role(m.role, "role"),
            group_id=m.group_id,
            scenario=m.scenario,
            revision=m.revision,
            model=m.model,
            model_dir=m.model_dir,
            manifest=m.manifest,
            options=tuple(sorted(m.engine_options.items())),
            spans_regions=m.spans_regions,
            domain=domain_from(m.domain) if m.HasField("domain") else None,
        ),
        peers=tuple(
            Peer(PeerId(p.instance_id, p.incarnation), _role(p.role, "peers"), (*p.kv_addresses,))
            for p in m.peers
        ),
    )


def domain_from(m: common_pb2.Domain) -> DomainRank:
    """Raises InvalidRequest."""
    if not m.domain_id:
        raise InvalidRequest("a domain needs a name", field="domain.domain_id")
    if m.dp_rank >= m.dp_size:
        raise InvalidRequest(
            f"a domain of {m.dp_size} has no rank {m.dp_rank}", field="domain.dp_rank"
        )
    return DomainRank(m.domain_id, m.dp_rank, m.dp_size, m.address)


def domain_to(domain: DomainRank) -> common_pb2.Domain:
    return common_pb2.Domain(
        domain_id=domain.domain_id,
        dp_rank=domain.dp_rank,
        dp_size=domain.dp_size,
        address=domain.address,
    )


def _role(number: int, field: str) -> Role:
    for known, role in ROLES.items():
        if known == number:
            return role
    raise InvalidRequest(f"unknown role {number}", field=field)
