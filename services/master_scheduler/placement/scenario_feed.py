"""Computes and exports figures of each scenario, such as waiting times and throughput (S138).

A scenario is a kind of requests with its own groups and SLOs. The figures come from the reports
that gateways publish on ended requests.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from functools import partial
from typing import Final

import msgspec
import structlog

from pdmesh.core.history.ended_request import EndedRequest, InstanceLoss
from pdmesh.core.placement.fleet import Fleet
from pdmesh.core.placement.plan import DEFAULT_SCENARIO
from pdmesh.core.ratio.counted_failures import is_by_client
from pdmesh.core.ratio.scenario_stats import (
    RequestSample,
    RoleSlots,
    Scenarios,
    ScenarioStats,
    slots_by_role,
)
from pdmesh.core.ratio.scenario_windows import ScenarioWindows
from pdmesh.core.ratio.throughput import Phi
from pdmesh.net import subjects
from pdmesh.net.bus import Bus, Message
from pdmesh.telemetry import metrics, names

log = structlog.get_logger(__name__)


class _Usage(msgspec.Struct, rename="camel"):
    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0
    num_cached_tokens: int = 0


class _Header(msgspec.Struct, rename="camel"):
    publisher_id: str = ""


class _Loss(msgspec.Struct, rename="camel"):
    at_ms: float = 0.0
    instance_ids: tuple[str, ...] = ()
    cause: str = ""
    num_tokens: int = 0
    choice: int = 0


class RequestFinishedJson(msgspec.Struct, rename="camel"):
    """The event RequestFinished, in protobuf's JSON format.

    msgspec parses it, because protobuf's parser would need a quarter of a millisecond for every
    request.
    """

    header: _Header = msgspec.field(default_factory=_Header)
    request_id: str = ""
    trace_id: str = ""
    model: str = ""
    scenario: str = ""
    outcome: str = ""
    reason: str = ""
    prefill_id: str = ""
    decode_id: str = ""
    pooling_id: str = ""
    operation: str = ""
    num_rejections: int = 0
    losses: tuple[_Loss, ...] = ()
    usage: _Usage = msgspec.field(default_factory=_Usage)
    queue_ms: float = 0.0
    ttft_ms: float = 0.0
    e2e_ms: float = 0.0
    kv_transfer_ms: float = 0.0
    decode_queue_ms: float = 0.0


_decoder = msgspec.json.Decoder(RequestFinishedJson)
_POOLING: Final = frozenset({"embeddings", "score", "rerank"})


OnRequest = Callable[[RequestFinishedJson], None]


class ScenarioFeed:
    """`on_completed` is called for each answered request, and `on_ended` for every request."""

    def __init__(
        self,
        scenarios: Scenarios,
        windows: ScenarioWindows,
        fleet: Fleet,
        bus: Bus,
        on_completed: OnRequest = lambda event: None,
        on_ended: OnRequest = lambda event: None,
    ) -> None:
        self._scenarios, self._windows = scenarios, windows
        self._fleet, self._bus = fleet, bus
        self._on_completed, self._on_ended = on_completed, on_ended

    async def run(self) -> None:
        """Runs until cancelled."""
        self._observe()
        subscription = await self._bus.subscribe(subjects.request_finished(), self._on_finished)
        try:
            await asyncio.Event().wait()
        finally:
            await subscription.unsubscribe()

    async def _on_finished(self, message: Message) -> None:
        """Count one request. A lost or repeated report changes the means only a little."""
        try:
            event = _decoder.decode(message.data)
        except msgspec.MsgspecError as exc:
            log.warning("scenario.bad_event", error=str(exc))
            return
        self._on_ended(event)
        if event.operation in _POOLING:  # a call for vectors or scores has no first token
            if event.outcome == "completed":
                self._on_completed(event)
            return
        if event.outcome == "completed":
            finished = finished_of(event)
            self._scenarios.handle(finished, time.monotonic())
            self._windows.finished(finished)
            self._on_completed(event)
            return
        scenario = event.scenario or DEFAULT_SCENARIO
        self._scenarios.unanswered(scenario, time.monotonic())
        if event.outcome == "failed" and not is_by_client(event.reason):
            self._windows.failed(scenario)

    def _observe(self) -> None:
        for name, help_text, unit, read in _MEANS:
            metrics.gauge(name, help_text, partial(self._means, read), unit)
        metrics.gauge(
            names.SCENARIO_RATE,
            "Requests/s that bound a scenario's throughput: arrivals I_t, prefill n_p b_p / T_p, "
            "decode n_d b_d / T_d",
            self._rates,
        )
        metrics.gauge(
            names.SCENARIO_PHI,
            "Phi, requests/s per instance: the lowest of the three rates divided by n_p + n_d",
            lambda: [(phi.value, {"scenario": scenario}) for scenario, phi in self._phis()],
        )
        metrics.gauge(
            names.SCENARIO_INSTANCES,
            "Usable instances by role (n_p, n_d)",
            lambda: self._slots(lambda slots: slots.num_instances),
        )
        metrics.gauge(
            names.SCENARIO_SLOTS,
            "Requests that the usable instances take at once, by role (n_p b_p, n_d b_d); includes "
            "the few that wait at a decode for their turn, as T_d does",
            lambda: self._slots(lambda slots: slots.num_slots),
        )

    def _means(self, read: Callable[[ScenarioStats], float]) -> list[tuple[float, dict[str, str]]]:
        return [(read(s), {"scenario": scenario}) for scenario, s in self._scenarios.items()]

    def _rates(self) -> list[tuple[float, dict[str, str]]]:
        shown = []
        for scenario, phi in self._phis():
            terms = {"arrivals": phi.arriving, "prefill": phi.prefill, "decode": phi.decode}
            shown += [
                (rate, {"scenario": scenario, "term": term})
                for term, rate in terms.items()
                if math.isfinite(rate)
            ]
        return shown

    def _phis(self) -> list[tuple[str, Phi]]:
        now, instances = time.monotonic(), list(self._fleet.instances.values())
        return [(s, self._scenarios.phi(s, instances, now)) for s, _ in self._scenarios.items()]

    def _slots(self, read: Callable[[RoleSlots], int]) -> list[tuple[float, dict[str, str]]]:
        instances = list(self._fleet.instances.values())
        return [
            (read(found), {"scenario": scenario, "role": role.value})
            for scenario, _ in self._scenarios.items()
            for role, found in slots_by_role(scenario, instances).items()
        ]


# The description and unit of each mean, which docs/telemetry.md also shows.
_MEANS: Final[tuple[tuple[str, str, str, Callable[[ScenarioStats], float]], ...]] = (
    (names.SCENARIO_QUEUE, "Wait until a prefill accepted the request", "s", lambda s: s.queue),
    (names.SCENARIO_T_P, "T_p, from a prefill's acceptance to token 1", "s", lambda s: s.t_p),
    (
        names.SCENARIO_DECODE_QUEUE,
        "Wait from token 1 until a decode accepted",
        "s",
        lambda s: s.decode_queue,
    ),
    (
        names.SCENARIO_T_D,
        "T_d, from a decode's acceptance to the last token",
        "s",
        lambda s: s.t_d,
    ),
    (names.SCENARIO_XI, "xi, the part of T_d that the KV transfer took", "s", lambda s: s.xi),
    (
        names.SCENARIO_TPOT,
        "TPOT, time per output token after the first without xi",
        "s",
        lambda s: s.tpot,
    ),
    (names.SCENARIO_HITS, "Share of prompt tokens found in a cache", "1", lambda s: s.hit_share),
    (names.SCENARIO_T_P_SHARE, "T_p / (T_p + T_d)", "1", lambda s: s.t_p_share),
)


def ended_of(event: RequestFinishedJson) -> EndedRequest:
    usage = event.usage
    return EndedRequest(
        request_id=event.request_id,
        scenario=event.scenario or DEFAULT_SCENARIO,
        outcome=event.outcome,
        gateway_id=event.header.publisher_id,
        trace_id=event.trace_id,
        model=event.model,
        operation=event.operation,
        reason=event.reason,
        is_by_client=is_by_client(event.reason),
        num_prompt_tokens=usage.num_prompt_tokens,
        num_cached_tokens=usage.num_cached_tokens,
        num_completion_tokens=usage.num_completion_tokens,
        num_rejections=event.num_rejections,
        prefill_id=event.prefill_id,
        decode_id=event.decode_id,
        pooling_id=event.pooling_id,
        queue_ms=event.queue_ms,
        ttft_ms=event.ttft_ms,
        e2e_ms=event.e2e_ms,
        kv_transfer_ms=event.kv_transfer_ms,
        decode_queue_ms=event.decode_queue_ms,
        losses=tuple(
            InstanceLoss(each.at_ms, each.instance_ids, each.cause, each.num_tokens, each.choice)
            for each in event.losses
        ),
    )


def finished_of(event: RequestFinishedJson) -> RequestSample:
    usage = event.usage
    return RequestSample(
        event.scenario or DEFAULT_SCENARIO,
        usage.num_prompt_tokens,
        usage.num_cached_tokens,
        usage.num_completion_tokens,
        event.queue_ms / 1e3,
        event.ttft_ms / 1e3,
        event.e2e_ms / 1e3,
        event.kv_transfer_ms / 1e3,
        event.decode_queue_ms / 1e3,
    )
