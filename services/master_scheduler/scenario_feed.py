"""Keeps the scenarios' numbers from what gateways say of each finished request, and shows them (S138)."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable

import msgspec
import structlog

from pdmesh.core.fleet import Fleet
from pdmesh.core.placement import DEFAULT_SCENARIO
from pdmesh.core.ratio_model import Phi
from pdmesh.core.scenario_stats import Finished, Scenarios, ScenarioStats
from pdmesh.core.scenario_windows import ScenarioWindows
from pdmesh.net import subjects
from pdmesh.net.bus import Bus, Message
from pdmesh.telemetry import metrics, names

log = structlog.get_logger(__name__)


class _Usage(msgspec.Struct, rename="camel"):
    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0
    num_cached_tokens: int = 0


class RequestFinishedJson(msgspec.Struct, rename="camel"):
    """What is needed of a RequestFinished, in protobuf's JSON: protobuf's own parser takes a quarter of a millisecond for it,
    and one comes with every request."""

    scenario: str = ""
    outcome: str = ""
    prefill_id: str = ""
    usage: _Usage = msgspec.field(default_factory=_Usage)
    queue_ms: float = 0.0
    ttft_ms: float = 0.0
    e2e_ms: float = 0.0
    kv_transfer_ms: float = 0.0


_decoder = msgspec.json.Decoder(RequestFinishedJson)


class ScenarioFeed:
    """`on_completed` hears of each request that was answered."""

    def __init__(
        self,
        scenarios: Scenarios,
        windows: ScenarioWindows,
        fleet: Fleet,
        bus: Bus,
        on_completed: Callable[[RequestFinishedJson], None] = lambda event: None,
    ) -> None:
        self._scenarios, self._windows = scenarios, windows
        self._fleet, self._bus = fleet, bus
        self._on_completed = on_completed

    async def run(self) -> None:
        """Until cancelled."""
        self._observe()
        subscription = await self._bus.subscribe(subjects.request_finished(), self._on_finished)
        try:
            await asyncio.Event().wait()
        finally:
            await subscription.unsubscribe()

    async def _on_finished(self, message: Message) -> None:
        """A lost or repeated one moves a mean a little: no sequence is kept."""
        try:
            event = _decoder.decode(message.data)
        except msgspec.MsgspecError as exc:
            log.warning("scenario.bad_event", error=str(exc))
            return
        if event.outcome == "completed":
            finished = finished_of(event)
            self._scenarios.handle(finished, time.monotonic())
            self._windows.finished(finished)
            self._on_completed(event)
        elif event.outcome == "failed":
            self._windows.failed(event.scenario or DEFAULT_SCENARIO)

    def _observe(self) -> None:
        def show(
            name: str, help: str, read: Callable[[ScenarioStats], float], unit: str = "s"
        ) -> None:
            def values() -> Iterable[tuple[float, dict[str, str]]]:
                return [
                    (read(s), {"scenario": scenario}) for scenario, s in self._scenarios.items()
                ]

            metrics.gauge(name, help, values, unit)

        show(names.SCENARIO_T_P, "From a prefill's acceptance to token 1 (T_p)", lambda s: s.t_p)
        show(names.SCENARIO_T_D, "From token 1 to the last (T_d)", lambda s: s.t_d)
        show(names.SCENARIO_XI, "KV transfer that a decode waited for (xi)", lambda s: s.xi)
        show(names.SCENARIO_TPOT, "Time per output token without the transfer", lambda s: s.tpot)
        show(names.SCENARIO_HITS, "Share of prompt tokens found cached", lambda s: s.hit_share, "1")
        show(names.SCENARIO_T_P_SHARE, "Share of T_p in T_p + T_d", lambda s: s.t_p_share, "1")
        metrics.gauge(
            names.SCENARIO_RATE, "The three rates that bound a scenario's throughput", self._rates
        )
        metrics.gauge(
            names.SCENARIO_PHI, "Throughput per instance, least of the three rates", self._phis
        )

    def _rates(self) -> list[tuple[float, dict[str, str]]]:
        shown = []
        for scenario, phi in self._each():
            terms = {"arrivals": phi.arriving, "prefill": phi.prefill, "decode": phi.decode}
            shown += [
                (rate, {"scenario": scenario, "term": term})
                for term, rate in terms.items()
                if math.isfinite(rate)
            ]
        return shown

    def _phis(self) -> list[tuple[float, dict[str, str]]]:
        return [(phi.value, {"scenario": scenario}) for scenario, phi in self._each()]

    def _each(self) -> list[tuple[str, Phi]]:
        now, instances = time.monotonic(), list(self._fleet.instances.values())
        return [(s, self._scenarios.phi(s, instances, now)) for s, _ in self._scenarios.items()]


def finished_of(event: RequestFinishedJson) -> Finished:
    usage = event.usage
    return Finished(
        event.scenario or DEFAULT_SCENARIO,
        usage.num_prompt_tokens,
        usage.num_cached_tokens,
        usage.num_completion_tokens,
        event.queue_ms / 1e3,
        event.ttft_ms / 1e3,
        event.e2e_ms / 1e3,
        event.kv_transfer_ms / 1e3,
    )
