"""Converts instance records and assignments between messages and the group controller's types."""

from __future__ import annotations

from typing import Final

from pdmesh.core.groups.cluster_state import InstanceStatus
from pdmesh.core.model import Assignment, DomainRank, PeerId, Phase, Role
from pdmesh.errors import InvalidRequest
from pdmesh.instance.incarnation.assignment import ROLES, TO_PROTO, domain_from, domain_to
from pdmesh.v1 import groups_pb2
from pdmesh.v1.common_pb2 import InstanceRecord, PeerRef

_PHASES: Final = {int(phase): phase for phase in Phase}


def seen_from(record: InstanceRecord, num_slots_used: int) -> InstanceStatus | None:
    """The instance's status. None if the process is not an instance, or its phase is unknown."""
    phase = _PHASES.get(record.phase)
    if phase is None:
        return None
    return InstanceStatus(
        instance_id=record.instance_id,
        incarnation=record.incarnation,
        phase=phase,
        role=ROLES.get(record.role, Role.NONE),
        group_id=record.group_id,
        scenario=record.scenario,
        revision=record.revision,
        assignment_id=record.assignment_id,
        region=record.region,
        rack=record.rack,
        kv_region=record.kv_region,
        kv_addresses=tuple(record.kv_addresses),
        verified=frozenset(map(_peer_id, record.verified_peers)),
        failed=frozenset(map(_peer_id, record.failed_peers)),
        failure=record.failure,
        num_slots_used=num_slots_used,
        node_id=record.node_id,
        domain=_domain(record),
        domain_address=record.domain_address,
    )


def assignment_to(instance_id: str, assignment: Assignment) -> groups_pb2.Assignment:
    role_spec = assignment.role_spec
    return groups_pb2.Assignment(
        instance_id=instance_id,
        incarnation=assignment.incarnation,
        epoch=assignment.epoch,
        assignment_id=assignment.assignment_id,
        stage=groups_pb2.Stage.ValueType(assignment.stage),
        role=TO_PROTO[role_spec.role],
        group_id=role_spec.group_id,
        scenario=role_spec.scenario,
        revision=role_spec.revision,
        model=role_spec.model,
        model_dir=role_spec.model_dir,
        manifest=role_spec.manifest,
        engine_options=dict(role_spec.options),
        spans_regions=role_spec.spans_regions,
        domain=domain_to(role_spec.domain) if role_spec.domain is not None else None,
        peers=[
            groups_pb2.Peer(
                instance_id=peer.id.instance_id,
                incarnation=peer.id.incarnation,
                role=TO_PROTO[peer.role],
                kv_addresses=peer.addresses,
            )
            for peer in assignment.peers
        ],
    )


def _domain(record: InstanceRecord) -> DomainRank | None:
    """The record's domain (data-parallel group).

    None if it is missing or its rank is impossible.
    """
    try:
        return domain_from(record.domain) if record.HasField("domain") else None
    except InvalidRequest:
        return None


def _peer_id(ref: PeerRef) -> PeerId:
    return PeerId(ref.instance_id, ref.incarnation)
