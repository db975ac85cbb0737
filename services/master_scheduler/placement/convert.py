"""Converts between the messages of SchedulerService and the core's types."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from pdmesh.core.health.liveness import Health
from pdmesh.core.kv.prefix.block_hash import HASH_BYTES
from pdmesh.core.model import Role
from pdmesh.core.placement.instance import Identity
from pdmesh.core.placement.plan import NoPlan, Plan, RankedInstance
from pdmesh.core.placement.policies import Query
from pdmesh.core.request.backpressure import Pressure, Queue
from pdmesh.errors import InvalidRequest
from pdmesh.net.convert.source_exclusions import excluded_from
from pdmesh.net.registry import takes_requests
from pdmesh.v1 import scheduler_service_pb2 as pb
from pdmesh.v1.common_pb2 import (
    INSTANCE_PHASE_CONNECTED,
    INSTANCE_PHASE_CONNECTING,
    INSTANCE_PHASE_DRAINED,
    INSTANCE_PHASE_DRAINING,
    INSTANCE_PHASE_LOADED,
    INSTANCE_PHASE_READY,
    ROLE_DECODE,
    ROLE_ENCODER,
    ROLE_FUSION,
    ROLE_NONE,
    ROLE_POOLING,
    ROLE_PREFILL,
    InstanceRecord,
)

_ROLES: Final = {
    ROLE_NONE: Role.NONE,
    ROLE_PREFILL: Role.PREFILL,
    ROLE_DECODE: Role.DECODE,
    ROLE_FUSION: Role.FUSION,
    ROLE_POOLING: Role.POOLING,
    ROLE_ENCODER: Role.ENCODER,
}
_LOADED: Final = (
    INSTANCE_PHASE_LOADED,
    INSTANCE_PHASE_CONNECTING,
    INSTANCE_PHASE_CONNECTED,
    INSTANCE_PHASE_READY,
    INSTANCE_PHASE_DRAINING,
    INSTANCE_PHASE_DRAINED,
)
_HEALTHS: Final = {
    Health.HEALTHY: pb.HEALTH_HEALTHY,
    Health.SUSPECT: pb.HEALTH_SUSPECT,
    Health.DEAD: pb.HEALTH_DEAD,
}
_MAX_HASHES: Final = 1_000_000
_MAX_UINT32: Final = 2**32 - 1


def identity_from(record: InstanceRecord) -> Identity | None:
    """The instance's identity. None if the process is not an instance or has no engine yet."""
    role = _ROLES.get(record.role)
    if role is None or record.phase not in _LOADED:
        return None
    return Identity(
        instance_id=record.instance_id,
        incarnation=record.incarnation,
        role=role,
        group_id=record.group_id,
        scenario=record.scenario,
        model=record.model,
        model_fingerprint=record.model_fingerprint,
        block_size=record.block_size,
        num_slots=record.num_slots,
        num_kv_blocks=record.num_kv_blocks,
        max_model_len=record.max_model_len,
        is_draining=record.is_draining,
        excluded_sources=excluded_from(record),
        is_ready=takes_requests(record),
        revision=record.revision,
        fetches_from_peers=record.fetches_from_peers,
        region=record.region,
        kv_region=record.kv_region,
        takes_adapters=record.max_adapters > 0,
        adapters=frozenset(record.loaded_adapters),
        takes_images=record.HasField("images"),
    )


def query_from(query: pb.PlanQuery, region: str = "") -> Query:
    """Convert a query. `region` is the region of the asking gateway. Raises InvalidRequest."""
    return Query(
        model=query.model,
        scenario=query.scenario,
        block_hashes=hashes_from(query.block_hashes, "queries.block_hashes"),
        num_prompt_tokens=query.num_prompt_tokens,
        max_tokens=query.max_tokens,
        chat_id=query.chat_id,
        excluded=frozenset(query.excluded_instance_ids),
        request_id=query.request_id,
        region=region,
        adapter=query.adapter_digest,
        has_images=query.has_images,
    )


def hashes_from(block_hashes: Iterable[bytes], field: str) -> list[bytes]:
    """Check the number and the size of the hashes. Raises InvalidRequest for `field`."""
    hashes = list(block_hashes)
    if len(hashes) > _MAX_HASHES or (hashes and set(map(len, hashes)) != {HASH_BYTES}):
        message = f"must have at most {_MAX_HASHES} hashes of {HASH_BYTES} bytes each"
        raise InvalidRequest(message, field=field)
    return hashes


def result_to(request_id: str, plan: Plan | NoPlan) -> pb.PlanResult:
    if isinstance(plan, NoPlan):
        return pb.PlanResult(
            request_id=request_id, error_reason=plan.reason, error_message=plan.message
        )
    return pb.PlanResult(
        request_id=request_id,
        group_id=plan.group_id,
        prefills=[_candidate_to(c) for c in plan.prefills],
        decodes=[_candidate_to(c) for c in plan.decodes],
        prompt_compute_ms=min(_MAX_UINT32, round(plan.prompt_compute_s * 1000)),
        first_token_ms=min(_MAX_UINT32, max(1, round(plan.first_token_s * 1000))),
    )


def queues_from(queues: Iterable[pb.ScenarioQueue]) -> Mapping[str, Queue]:
    return {queue.scenario: dict(queue.num_waiting) for queue in queues}


def pressure_to(pressure: Pressure) -> pb.ScenarioPressure:
    return pb.ScenarioPressure(
        queue=pb.ScenarioQueue(scenario=pressure.scenario, num_waiting=pressure.waiting),
        max_waiting=pressure.max_waiting,
        prefills_per_s=pressure.prefills_per_s,
    )


def health_to(health: Health) -> pb.Health.ValueType:
    return _HEALTHS[health]


def _candidate_to(candidate: RankedInstance) -> pb.Candidate:
    return pb.Candidate(
        instance_id=candidate.instance_id,
        incarnation=candidate.incarnation,
        num_matched_tokens=candidate.num_matched_tokens,
        score=candidate.score,
        is_local=candidate.is_local,
    )
