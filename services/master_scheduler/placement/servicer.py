"""SchedulerService: the leading master answers queries of gateways with plans, from memory.

A plan names the instances that may serve a request, best first.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import grpc
import structlog
from opentelemetry.trace import INVALID_SPAN, Span, SpanKind

from pdmesh.core.access.process_identity import ProcessIdentity
from pdmesh.core.groups.membership_changes import GroupChanged, GroupTracker
from pdmesh.core.kv.prefix.prefix_index import PrefixIndex
from pdmesh.core.placement.fleet import Fleet
from pdmesh.core.placement.instance import Instance
from pdmesh.core.placement.plan import DEFAULT_SCENARIO, NoPlan, Placement, Plan
from pdmesh.core.request.backpressure import Backpressure
from pdmesh.errors import InvalidRequest, NotLeader
from pdmesh.net.grpc.peers import caller_of, check_says
from pdmesh.net.registry import RegistryView
from pdmesh.services.master_scheduler.placement import convert
from pdmesh.telemetry import metrics, names, traces
from pdmesh.v1 import scheduler_service_pb2 as pb

log = structlog.get_logger(__name__)

_MAX_QUERIES: Final = 4096

_plans = metrics.counter(names.PLANS, "Queries planned, by outcome")
_duration = metrics.histogram(
    names.PLAN_DURATION,
    "Time to plan one query",
    buckets=(0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05),
)

_Step = Callable[[str], AbstractContextManager[Span]]  # makes a span with the given name
_UNTRACED: Final = nullcontext(INVALID_SPAN)

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class PlanningCores:
    """The objects from which a query is answered.

    `placement` ranks instances, `index` knows which instances have which blocks in a cache, and
    `backpressure` counts waiting requests.
    """

    placement: Placement
    index: PrefixIndex
    backpressure: Backpressure


class SchedulerServicer:
    """The methods of the service.

    `leadership` returns whether this process leads now, and its epoch.
    """

    def __init__(
        self,
        cores: PlanningCores,
        groups: GroupTracker,
        view: RegistryView,
        leadership: Callable[[], tuple[bool, int]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._placement, self._index = cores.placement, cores.index
        self._backpressure, self._groups = cores.backpressure, groups
        self._view, self._leadership, self._clock = view, leadership, clock

    async def Plan(self, request: pb.PlanRequest, context: Context) -> pb.PlanResponse:  # noqa: N802
        return self._answer(request, caller_of(context))

    def _answer(self, request: pb.PlanRequest, caller: ProcessIdentity | None) -> pb.PlanResponse:
        epoch = self._epoch_of_leader()
        check_says(caller, request.gateway_id, "gateway_id")
        if len(request.queries) > _MAX_QUERIES:
            raise InvalidRequest(f"must have at most {_MAX_QUERIES} queries", field="queries")
        now = self._clock()
        self._backpressure.book.tell(request.gateway_id, convert.queues_from(request.queues), now)
        scenarios = dict.fromkeys(q.scenario or DEFAULT_SCENARIO for q in request.queries)
        return pb.PlanResponse(
            epoch=epoch,
            results=[self._plan(q, request) for q in request.queries],
            pressures=[convert.pressure_to(self._backpressure.pressure(s, now)) for s in scenarios],
        )

    async def PlanStream(  # noqa: N802
        self, requests: AsyncIterator[pb.PlanStreamRequest], context: Context
    ) -> AsyncIterator[pb.PlanStreamResponse]:
        caller = caller_of(context)
        async for request in requests:
            yield pb.PlanStreamResponse(response=self._answer(request.request, caller))

    async def MatchPrefix(  # noqa: N802
        self, request: pb.MatchPrefixRequest, context: Context
    ) -> pb.MatchPrefixResponse:
        epoch = self._epoch_of_leader()
        check_says(caller_of(context), request.gateway_id, "gateway_id")
        matches = self._index.match(convert.hashes_from(request.block_hashes, "block_hashes"))
        longest = self._placement.fleet.longest_by_scenario(matches)
        return pb.MatchPrefixResponse(epoch=epoch, num_blocks=longest)

    async def ListGroups(  # noqa: N802
        self, request: pb.ListGroupsRequest, context: Context
    ) -> pb.ListGroupsResponse:
        epoch = self._epoch_of_leader()
        return pb.ListGroupsResponse(
            epoch=epoch, groups=[self._group(group) for group in self._groups.groups]
        )

    def _epoch_of_leader(self) -> int:
        is_leader, epoch = self._leadership()
        if not is_leader:
            raise NotLeader("this master is a standby")
        return epoch

    def _plan(self, query: pb.PlanQuery, request: pb.PlanRequest) -> pb.PlanResult:
        parent = traces.sampled_context(query.traceparent)
        if parent is None:  # no spans, which would cost as much as the plan
            return self._plan_stepwise(query, request.region, lambda name: _UNTRACED)
        with traces.tracer().start_as_current_span(
            names.SPAN_PLAN, parent, SpanKind.SERVER
        ) as span:
            span.set_attribute(names.ATTR_REQUEST_ID, query.request_id)
            span.set_attribute(names.ATTR_PLAN_QUERIES, len(request.queries))
            result = self._plan_stepwise(
                query, request.region, traces.tracer().start_as_current_span
            )
            span.set_attribute(names.ATTR_GROUP_ID, result.group_id)
            return result

    def _plan_stepwise(self, message: pb.PlanQuery, region: str, step: _Step) -> pb.PlanResult:
        """Look up the prompt's blocks in the index, then rank the instances (S81)."""
        began = time.perf_counter()
        query = convert.query_from(message, region)
        with step(names.SPAN_PLAN_MATCH) as span:
            matches = self._index.match(query.block_hashes)
            peers = self._index.peer_runs(query.block_hashes)
            span.set_attribute(names.ATTR_PLAN_HOLDERS, len(matches))
        with step(names.SPAN_PLAN_DECIDE) as span:
            plan = self._placement.plan(
                query, matches, self._clock(), peers, num_cached=self._index.num_blocks_of
            )
            if isinstance(plan, Plan):
                span.set_attribute(names.ATTR_PREFILL_ID, plan.prefills[0].instance_id)
                span.set_attribute(names.ATTR_MATCHED_TOKENS, plan.prefills[0].num_matched_tokens)
        result = convert.result_to(message.request_id, plan)
        _duration.record(time.perf_counter() - began)
        if isinstance(plan, NoPlan):
            _plans.add(1, {names.ATTR_OUTCOME: plan.reason})
            log.debug("plan.refused", request_id=message.request_id, reason=plan.reason)
        else:
            _plans.add(1, {names.ATTR_OUTCOME: "planned"})
            log.debug(
                "plan.made",
                request_id=message.request_id,
                attempt=message.attempt,
                group_id=plan.group_id,
                prefill_id=plan.prefills[0].instance_id,
                decode_id=plan.decodes[0].instance_id if plan.decodes else "",
                num_matched_tokens=plan.prefills[0].num_matched_tokens,
            )
        return result

    def _group(self, group: GroupChanged) -> pb.Group:
        fleet: Fleet = self._placement.fleet
        members = (
            *group.prefill_ids,
            *group.decode_ids,
            *group.fusion_ids,
            *group.pooling_ids,
            *group.encoder_ids,
        )
        return pb.Group(
            group_id=group.group_id,
            scenario=group.scenario,
            model=group.model,
            instances=[self._state(fleet.instances[i]) for i in members if i in fleet.instances],
        )

    def _state(self, instance: Instance) -> pb.InstanceState:
        instance_id = instance.identity.instance_id
        age_s = 0.0 if instance.reported_at is None else self._clock() - instance.reported_at
        return pb.InstanceState(
            record=self._view.records.get(instance_id),
            health=convert.health_to(instance.health),
            num_slots_used=instance.num_slots_used,
            num_kv_blocks_free=instance.num_kv_blocks_free,
            load_age_ms=int(age_s * 1000),
            num_indexed_blocks=self._index.num_blocks_of(instance_id),
            **_fault(instance),
        )


def _fault(instance: Instance) -> dict[str, Any]:
    """The fields of InstanceState that describe the instance's fault, for operators."""
    fault = instance.fault
    if fault is None:
        return {}
    reasons = ", ".join(dict.fromkeys(fault.reasons))
    held = f" (held back: {fault.held_back})" if fault.held_back else ""
    return {"fault_level": int(fault.level), "fault_reasons": f"{reasons}{held}"}
