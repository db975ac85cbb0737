"""Answers operators who look at the mesh: its present state, its history, one request's steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, Final

from google.protobuf.timestamp_pb2 import Timestamp

from pdmesh.core.history.incidents import Trouble
from pdmesh.core.history.kv_flows import WINDOW_S
from pdmesh.core.history.scenario_history import STEP_S, HistoryStep
from pdmesh.core.placement.instance import Instance
from pdmesh.core.request.backpressure import Backpressure
from pdmesh.errors import InvalidRequest, shortened
from pdmesh.instance.incarnation.assignment import ROLES
from pdmesh.services.master_scheduler.groups.cluster_view import ClusterView
from pdmesh.services.master_scheduler.overview.history_feed import HistoryFeed
from pdmesh.v1 import overview_pb2 as pb
from pdmesh.v1.common_pb2 import InstanceRecord

_MAX_ID: Final = 128


class Overview:
    """Makes the answers. `wall` is unix time. `clock` is the clock that the feed uses as well."""

    def __init__(
        self,
        feed: HistoryFeed,
        view: ClusterView,
        backpressure: Backpressure,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.feed, self._view, self._backpressure = feed, view, backpressure
        self._clock, self._wall = clock, wall
        self._history: pb.GetHistoryResponse | None = None  # kept until `_history_until`
        self._history_until = 0.0

    def now(self, caller: pb.Caller, epoch: int) -> pb.GetOverviewResponse:
        books, records = self.feed.books, self._view.registry.records
        leader = next((r.instance_id for r in records.values() if r.is_leader), "")
        response = pb.GetOverviewResponse(
            now=_at(self._wall()),
            leader_id=leader,
            epoch=epoch,
            caller=caller,
            flow_window_s=WINDOW_S,
        )
        for _, record in sorted(records.items()):
            if record.role in ROLES:
                response.instances.append(self._instance(record))
            else:
                response.processes.append(_process_to(record))
        for (prefill, decode), flow in books.flows.flows(self._clock()).items():
            response.flows.add(
                prefill_id=prefill,
                decode_id=decode,
                num_requests=flow.num_requests,
                num_tokens=flow.num_tokens,
                mean_transfer_ms=flow.transfer_ms / flow.num_requests,
            )
        response.waiting_rooms.extend(self._rooms())
        response.incidents.extend(map(_incident_to, books.incidents.latest()))
        for event in books.happenings.latest():
            response.happenings.add(
                at=_at(event.at),
                kind=event.kind,
                about=event.about,
                what=event.what,
                count=event.count,
            )
        return response

    def history(self) -> pb.GetHistoryResponse:
        """The history in steps of `STEP_S`.

        Ended steps do not change. So the answer is made once and returned until the next step.
        """
        now = self._clock()
        if self._history is None or now >= self._history_until:
            self._history, self._history_until = (
                self._make_history(now),
                now - now % STEP_S + STEP_S,
            )
        return self._history

    def _make_history(self, now: float) -> pb.GetHistoryResponse:
        response = pb.GetHistoryResponse(step_s=STEP_S)
        response.until.CopyFrom(_at(self._wall() - now % STEP_S))
        for scenario, steps in self.feed.books.answers.steps(now).items():
            response.scenarios.append(_scenario_to(scenario, steps))
        return response

    def story(self, request_id: str) -> pb.GetRequestStoryResponse:
        """The steps of one request. Raises InvalidRequest if the request is unknown."""
        if not 0 < len(request_id) <= _MAX_ID:
            raise InvalidRequest(f"must have 1 to {_MAX_ID} characters", field="request_id")
        requests = self.feed.books.requests
        steps, request = requests.story(request_id), requests.of(request_id)
        if not steps:
            raise InvalidRequest(
                f"this master knows no request {shortened(request_id, 80)}: it still runs, it is "
                "too long ago, or another mesh served it",
                field="request_id",
            )
        response = pb.GetRequestStoryResponse(request_id=request_id)
        if request is not None:
            response.request_id, response.trace_id = request.request_id, request.trace_id
            response.model, response.scenario = request.model, request.scenario
            response.outcome, response.reason = request.outcome, request.reason
        for step in steps:
            response.steps.add(at=_at(step.at), told_by=step.process, what=step.what)
        return response

    def _instance(self, record: InstanceRecord) -> pb.InstanceLook:
        look = pb.InstanceLook(
            instance_id=record.instance_id,
            incarnation=record.incarnation,
            role=record.role,
            phase=record.phase,
            group_id=record.group_id,
            scenario=record.scenario,
            model=record.model,
            region=record.region,
            is_draining=record.is_draining,
            num_slots=record.num_slots,
            num_kv_blocks=record.num_kv_blocks,
        )
        if (out := self._view.out_of_service.of(record.instance_id)) is not None:
            look.out_of_service = out.reason or "no reason was given"
        instance = self._view.fleet.instances.get(record.instance_id)
        if instance is not None and instance.identity.incarnation == record.incarnation:
            _add_load(look, instance)
        return look

    def _rooms(self) -> Iterator[pb.WaitingRoom]:
        now = self._clock()
        served = {i.identity.scenario for i in self._view.fleet.instances.values()}
        for scenario in sorted((served - {""}) | set(self._backpressure.book.scenarios())):
            pressure = self._backpressure.pressure(scenario, now)
            yield pb.WaitingRoom(
                scenario=scenario,
                waiting=dict(pressure.waiting),
                max_waiting=pressure.max_waiting,
                prefills_per_s=pressure.prefills_per_s,
            )


def _add_load(look: pb.InstanceLook, instance: Instance) -> None:
    look.health, look.is_usable = instance.health.value, instance.is_usable
    look.is_draining = look.is_draining or instance.is_draining
    look.num_slots, look.num_slots_used = instance.num_slots, instance.used_slots()
    look.num_kv_blocks_free = instance.free_blocks()
    if instance.fault is not None:
        look.fault_level, look.held_back = instance.fault.level, instance.fault.held_back
        look.fault_reasons.extend(instance.fault.reasons)


def _process_to(record: InstanceRecord) -> pb.ProcessLook:
    return pb.ProcessLook(
        instance_id=record.instance_id,
        service=record.service,
        region=record.region,
        version=record.version,
        is_leader=record.is_leader,
    )


def _scenario_to(scenario: str, steps: list[HistoryStep]) -> pb.ScenarioHistory:
    lists: dict[str, Any] = {  # Any: numbers of several kinds
        name: [getattr(step, name) for step in steps]
        for name in ("num_answered", "num_failed", "num_cancelled", "num_tokens")
    }
    return pb.ScenarioHistory(
        scenario=scenario,
        ttft_p50_ms=[step.ttft_ms(0.5) for step in steps],
        ttft_p99_ms=[step.ttft_ms(0.99) for step in steps],
        **lists,
    )


def _incident_to(trouble: Trouble) -> pb.Incident:
    incident = pb.Incident(
        instance_id=trouble.instance_id,
        incarnation=trouble.incarnation,
        began_at=_at(trouble.began_at),
        cause=trouble.cause,
        num_requests_moved=trouble.num_moved,
        num_requests_failed=trouble.num_failed,
    )
    if trouble.ended_at:
        incident.ended_at.CopyFrom(_at(trouble.ended_at))
    for at, what in trouble.steps:
        incident.steps.add(at=_at(at), what=what)
    return incident


def _at(seconds: float) -> Timestamp:
    found = Timestamp()
    found.FromMicroseconds(round(seconds * 1e6))
    return found
