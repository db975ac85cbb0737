"""Gets plans for requests. A plan names the instances that may serve a request, best first.

The planner asks the master. If no master answers, the planner ranks the instances itself (F11,
F12). Only one call to the master is in flight at a time. Queries that arrive during a call are sent
together with the next call, so that a request of a busy gateway costs only a fraction of a call. An
answer with the epoch of a former leader is refused (I7). A scenario is a kind of requests.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

import structlog

from pdmesh.core.control.leadership import EpochFence
from pdmesh.core.request.backpressure import Pressure, PressureView, Queue
from pdmesh.core.request.events import (
    Candidate,
    Event,
    PlanFailed,
    PlanReceived,
)
from pdmesh.errors import (
    InvalidRequest,
    MeshError,
    ModelNotFound,
    NoInstance,
    Overloaded,
    ScenarioNotFound,
    StalePlan,
    Unavailable,
    shortened,
)
from pdmesh.net.tasks import end, watched
from pdmesh.services.gateway.routing.fleet import FleetView, Wanted
from pdmesh.services.gateway.routing.plan_stream import PlanStream
from pdmesh.telemetry import metrics, names
from pdmesh.v1.common_pb2 import InstanceRecord
from pdmesh.v1.scheduler_service_pb2 import (
    Candidate as CandidateProto,
)
from pdmesh.v1.scheduler_service_pb2 import (
    PlanQuery,
    PlanResponse,
    PlanResult,
    PlanStreamRequest,
)

log = structlog.get_logger(__name__)

_unasked = metrics.counter(
    names.REFUSED_UNASKED,
    "Requests refused because of the queue's length, without asking the master",
)

_MAX_BATCH: Final = 256
_RETRY_MASTER_S: Final = 0.25  # after a failure of all masters, none is asked for this time


_Place = tuple[str, str]  # a master's instance id, and its address


class Asker(Protocol):
    def on_event(self, event: Event) -> None: ...


class _Ask:
    __slots__ = ("asker", "plan", "query", "wanted")

    def __init__(self, asker: Asker, plan: int, query: PlanQuery, wanted: Wanted) -> None:
        self.asker, self.plan, self.query, self.wanted = asker, plan, query, wanted


class Planner:
    """Plans the requests of one gateway.

    `num_open(instance_id, incarnation)` counts this gateway's legs (requests on an instance).
    `queues` returns the number of the gateway's queued requests, by scenario and priority.
    """

    def __init__(
        self,
        fleet: FleetView,
        gateway_id: str,
        num_open: Callable[[str, int], int],
        queues: Callable[[], Mapping[str, Queue]],
        *,
        timeout_s: float,
        max_staleness_s: float,
    ) -> None:
        self._fleet = fleet
        self._gateway_id = gateway_id
        self._num_open = num_open
        self._queues = queues
        self._pressures = PressureView()
        self._timeout_s = timeout_s
        self._max_staleness_s = max_staleness_s
        self._fence = EpochFence()
        self._asks: list[_Ask] = []
        self._closing: set[asyncio.Task[None]] = set()  # streams to former masters
        self._has_asks = asyncio.Event()
        self._streams: dict[_Place, PlanStream] = {}
        self._leader = ""  # instance id of the last master that answered
        self._ask_master_at = 0.0
        self.num_planned = 0
        self.num_fallbacks = 0
        self.num_handed = 0

    def ask(
        self,
        asker: Asker,
        plan: int,
        query: PlanQuery,
        vocabulary: str = "",
        handed: PlanResult | None = None,
    ) -> None:
        """Ask for a plan. The asker gets PlanReceived or PlanFailed.

        `vocabulary` identifies the vocabulary of the query's tokens. `handed` is a plan that the
        endpoint picker, a service in front of the gateways, already got from the master for this
        request. This plan is used at once if this gateway can use enough of its instances.
        """
        wanted = Wanted(query.model, vocabulary, query.adapter_digest, query.has_images)
        ask = _Ask(asker, plan, query, wanted)
        if handed is not None and (received := self._received(ask, handed)) is not None:
            self.num_handed += 1
            asker.on_event(received)
            return
        self._asks.append(ask)
        self._has_asks.set()

    def refusal(
        self, scenario: str, priority: int, ttft_s: float, can_evict: bool
    ) -> Overloaded | None:
        """The error for a new request that is refused without asking for a plan (S97).

        A request is refused if too many requests wait, or if it could not get its first token
        within `ttft_s`. None if the request may ask for a plan.
        """
        own = self._queues().get(scenario, {})
        now = time.monotonic()
        found = self._pressures.refusal(scenario, own, priority, ttft_s, now, can_evict=can_evict)
        if found is None:
            return None
        _unasked.add(1, {names.ATTR_REASON: found.reason})
        return Overloaded(
            "too many requests are waiting",
            reason=found.reason,
            retry_after_ms=max(1000, math.ceil(found.retry_after_s * 1000)),
        )

    async def run(self) -> None:
        while True:
            await self._has_asks.wait()
            await self._answer(self._next_asks())

    def _next_asks(self) -> list[_Ask]:
        """Take the next batch.

        `run` must not store the batch in a variable, because this would keep the last queries in
        memory while `run` waits.
        """
        asks, self._asks = self._asks[:_MAX_BATCH], self._asks[_MAX_BATCH:]
        if not self._asks:
            self._has_asks.clear()
        return asks

    async def close(self) -> None:
        streams, self._streams = list(self._streams.values()), {}
        await asyncio.gather(*(stream.close() for stream in streams))
        await end([*self._closing])

    async def _answer(self, asks: Sequence[_Ask]) -> None:
        try:
            response = await self._ask_master([a.query for a in asks])
        except MeshError as exc:
            log.debug("plan.fallback", reason=exc.reason)
            response = None
        for index, ask in enumerate(asks):
            if response is None or index >= len(response.results):
                self.num_fallbacks += 1
                ask.asker.on_event(self._rank_here(ask))
            else:
                self.num_planned += 1
                ask.asker.on_event(self._from_result(ask, response.results[index]))

    # --- the master ------------------------------------------------------------------------------

    async def _ask_master(self, queries: Sequence[PlanQuery]) -> PlanResponse:
        """Ask the masters, the leader first, until one answers. Raises MeshError."""
        masters = sorted(
            self._fleet.masters(), key=lambda r: (not r.is_leader, r.instance_id != self._leader)
        )
        if time.monotonic() < self._ask_master_at:
            raise Unavailable("the master failed a moment ago")
        told = {scenario: dict(queue) for scenario, queue in self._queues().items()}
        asked = PlanStreamRequest()  # filled in place, so that the queries are copied only once
        asked.request.gateway_id = self._gateway_id
        asked.request.region = self._fleet.region
        asked.request.queries.extend(queries)
        for scenario, queue in told.items():
            asked.request.queues.add(scenario=scenario, num_waiting=queue)
        for master in masters:
            try:
                response = await self._call(master, asked)
            except MeshError:
                if master is masters[-1]:
                    self._ask_master_at = time.monotonic() + _RETRY_MASTER_S
                    raise
            else:
                self._hear_pressures(response, told)
                return response
        raise Unavailable("no master")

    async def _call(self, master: InstanceRecord, asked: PlanStreamRequest) -> PlanResponse:
        place = _place(master)
        stream = self._streams.get(place)
        if stream is None:
            self._drop_streams_but({_place(m) for m in self._fleet.masters()})
            stream = self._streams[place] = PlanStream(master)
        response = await stream.ask(asked, self._timeout_s)
        if not self._fence.admit(response.epoch, time.monotonic()):
            raise StalePlan("a master of an older epoch answered")
        self._leader = master.instance_id
        return response

    def _hear_pressures(self, response: PlanResponse, told: Mapping[str, Queue]) -> None:
        now = time.monotonic()
        for each in response.pressures:
            scenario = each.queue.scenario
            waiting = dict(each.queue.num_waiting)
            pressure = Pressure(scenario, waiting, each.max_waiting, each.prefills_per_s)
            self._pressures.hear(pressure, told.get(scenario, {}), now)

    def _drop_streams_but(self, places: set[_Place]) -> None:
        for place in [p for p in self._streams if p not in places]:
            stream = self._streams.pop(place)
            task = watched(stream.close(), "close a plan stream", lambda _: None)
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    def _from_result(self, ask: _Ask, result: PlanResult) -> Event:
        if result.error_reason:
            is_away = self._fleet.has_served(ask.query.model, ask.query.scenario)
            return PlanFailed(ask.plan, _refusal(result, is_away))
        return self._received(ask, result) or self._rank_here(ask)

    def _received(self, ask: _Ask, result: PlanResult) -> PlanReceived | None:
        """The plan as an event. None if this gateway cannot use enough of the plan's instances.

        The master's view of the instances may be newer or older than the gateway's view.
        """
        prefills = self._resolve(ask.wanted, result.prefills)
        decodes = self._resolve(ask.wanted, result.decodes)
        if not any(c.is_local for c in prefills) and not (prefills and decodes):
            return None
        return PlanReceived(
            ask.plan,
            prefills,
            decodes,
            result.prompt_compute_ms / 1000,
            result.first_token_ms / 1000,
        )

    def _resolve(self, wanted: Wanted, candidates: Sequence[CandidateProto]) -> list[Candidate]:
        find = self._fleet.candidate
        return [
            found
            for c in candidates
            if (
                found := find(
                    c.instance_id, c.incarnation, wanted, c.num_matched_tokens, is_local=c.is_local
                )
            )
        ]

    # --- without a master ------------------------------------------------------------------------

    def _rank_here(self, ask: _Ask) -> Event:
        if self._fleet.staleness_s() > self._max_staleness_s:
            return PlanFailed(
                ask.plan, NoInstance("master and registry have been unavailable for too long")
            )
        query = ask.query
        prefills, decodes = self._fleet.least_loaded(
            ask.wanted, query.scenario, query.excluded_instance_ids, self._num_open
        )
        if not (prefills or decodes) and self._fleet.is_served_elsewhere(
            query.model, query.scenario
        ):
            model, scenario = shortened(query.model), shortened(query.scenario)
            message = f"no instance serves {model} for the scenario {scenario}"
            return PlanFailed(ask.plan, ScenarioNotFound(message, field="scenario"))
        return PlanReceived(ask.plan, prefills, decodes, is_by_master=False)


def _place(master: InstanceRecord) -> _Place:
    return master.instance_id, master.grpc_address


def _refusal(result: PlanResult, is_away: bool) -> MeshError:
    message = result.error_message or "no instance can serve this request now"
    match result.error_reason:
        case "MODEL_NOT_FOUND" if not is_away:
            return ModelNotFound(message, field="model")
        case "SCENARIO_NOT_FOUND" if not is_away:
            return ScenarioNotFound(message, field="scenario")
        case "PROMPT_TOO_LONG":
            # The request fits the model's context, as the gateway has checked. So no instance has
            # enough memory for it.
            return InvalidRequest(message, reason="CONTEXT_LENGTH_EXCEEDED", field="max_tokens")
    return NoInstance(message)
