"""Describes each group for operators: its desired numbers, its members, and their phases."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pdmesh.core.groups.cluster_state import Observed, WantedGroup
from pdmesh.core.groups.controller import GroupReport
from pdmesh.core.model import Role
from pdmesh.instance.incarnation.assignment import TO_PROTO, domain_to
from pdmesh.v1 import admin_service_pb2 as pb
from pdmesh.v1.common_pb2 import InstancePhase
from pdmesh.v1.groups_pb2 import Stage


def group_states(observed: Observed, reports: Iterable[GroupReport]) -> list[pb.GroupState]:
    members: dict[str, list[str]] = {}
    for instance_id, given in sorted(observed.given.items()):
        members.setdefault(given.role_spec.group_id, []).append(instance_id)
    return [_group_state(observed, r, members.get(r.group_id, ())) for r in reports]


def _group_state(
    observed: Observed, report: GroupReport, instance_ids: Iterable[str]
) -> pb.GroupState:
    group = observed.wanted.groups.get(report.group_id)
    state = pb.GroupState(
        group_id=report.group_id, state=report.state.value, detail=report.detail, **_wanted(group)
    )
    for instance_id in instance_ids:
        given, seen = observed.given[instance_id], observed.seen.get(instance_id)
        if seen is None:
            continue
        state.scenario = given.role_spec.scenario
        if seen.incarnation == given.incarnation:
            if seen.region and seen.region not in state.regions:
                state.regions.append(seen.region)
            state.members.append(
                pb.GroupMember(
                    instance_id=instance_id,
                    incarnation=seen.incarnation,
                    role=TO_PROTO[given.role_spec.role],
                    phase=InstancePhase.ValueType(seen.phase),
                    stage=Stage.ValueType(given.stage),
                    revision=given.role_spec.revision,
                    assignment_id=given.assignment_id,
                    domain=domain_to(domain) if (domain := given.role_spec.domain) else None,
                )
            )
    return state


def _wanted(group: WantedGroup | None) -> dict[str, Any]:
    """The fields of GroupState that the desired state determines."""
    if group is None:
        return {}
    return {
        "scenario": group.scenario,
        "num_prefill_wanted": group.counts[Role.PREFILL],
        "num_decode_wanted": group.counts[Role.DECODE],
        "num_fusion_wanted": group.counts[Role.FUSION],
        "num_pooling_wanted": group.counts[Role.POOLING],
        "num_encoder_wanted": group.counts[Role.ENCODER],
        "revision": group.revision,
    }
