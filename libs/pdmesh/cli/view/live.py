"""The view of `pdmesh top`, from the mesh's events: requests by scenario, and instances' load.

A scenario is a kind of requests with its own groups of instances.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from pdmesh.cli.view.table import table
from pdmesh.events.v1.events_pb2 import InstanceLoad, RequestFinished

WINDOW_S: Final = 10.0
_MAX_REQUESTS: Final = 20_000  # if more requests end in the window, only the latest ones count
_SILENT_S: Final = 3.0  # an instance reports its load at least every second


@dataclass(slots=True)
class _Instance:
    load: InstanceLoad
    at: float
    # For each computed prompt: the time, its tokens, and the cached ones among these tokens.
    computed: deque[tuple[float, int, int]] = field(default_factory=deque)


class LiveView:
    """The latest requests and loads. All times are in seconds, from the same clock."""

    def __init__(self, began: float) -> None:
        self._began = began
        self._finished: deque[tuple[float, RequestFinished]] = deque(maxlen=_MAX_REQUESTS)
        self._instances: dict[str, _Instance] = {}

    def on_finished(self, event: RequestFinished, now: float) -> None:
        self._finished.append((now, event))

    def on_load(self, event: InstanceLoad, now: float) -> None:
        name = event.header.publisher_id
        known = self._instances.setdefault(name, _Instance(event, now))
        known.load, known.at = event, now
        known.computed.extend((now, c.num_tokens, c.num_cached_tokens) for c in event.computed)

    def text(self, now: float) -> str:
        self._forget(now - WINDOW_S)
        seconds = max(1.0, min(WINDOW_S, now - self._began))
        by_scenario: dict[str, list[RequestFinished]] = defaultdict(list)
        for _, event in self._finished:
            by_scenario[event.scenario or "-"].append(event)
        rows = [_scenario(name, events, seconds) for name, events in sorted(by_scenario.items())]
        instances = [_load(n, each, now, seconds) for n, each in sorted(self._instances.items())]
        return "\n".join(
            [
                f"requests that ended in the last {seconds:.0f} s",
                table(_SCENARIO_COLUMNS, rows),
                "",
                table(_INSTANCE_COLUMNS, instances),
            ]
        )

    def _forget(self, before: float) -> None:
        while self._finished and self._finished[0][0] < before:
            self._finished.popleft()
        for each in self._instances.values():
            while each.computed and each.computed[0][0] < before:
                each.computed.popleft()


_SCENARIO_COLUMNS: Final = (
    "SCENARIO", "REQ/S", "TOKENS/S", "FAILED", "TTFT P50", "P99", "TPOT P50", "QUEUE P50",
    "MIGRATIONS",
)  # fmt: skip
_INSTANCE_COLUMNS: Final = ("INSTANCE", "SLOTS", "KV FREE", "PROMPT TOKENS/S", "CACHED", "STATE")


def _scenario(name: str, events: Sequence[RequestFinished], seconds: float) -> tuple[str, ...]:
    """One row of the table of scenarios. The times are those of completed requests."""
    whole = [e for e in events if e.outcome == "completed"]
    steps = [
        (e.e2e_ms - e.ttft_ms) / (e.usage.num_completion_tokens - 1)
        for e in whole
        if e.usage.num_completion_tokens > 1
    ]
    ttfts = [e.ttft_ms for e in whole if e.ttft_ms]
    return (
        name,
        f"{len(events) / seconds:.1f}",
        f"{sum(e.usage.num_completion_tokens for e in events) / seconds:.0f}",
        str(sum(e.outcome == "failed" for e in events)),
        _ms(ttfts, 0.5),
        _ms(ttfts, 0.99),
        _ms(steps, 0.5),
        _ms((e.queue_ms for e in whole), 0.5),
        str(sum(e.num_migrations for e in events)),
    )


def _load(name: str, each: _Instance, now: float, seconds: float) -> tuple[str, ...]:
    tokens, cached = (sum(c[i] for c in each.computed) for i in (1, 2))
    state = "draining" if each.load.is_draining else ""
    if (silent_s := now - each.at) > _SILENT_S:
        state = f"silent for {silent_s:.0f} s"
    return (
        name,
        f"{each.load.num_slots_used}/{each.load.num_slots}",
        str(each.load.num_kv_blocks_free),
        f"{tokens / seconds:.0f}",
        f"{cached / tokens:.0%}" if tokens else "-",
        state,
    )


def _ms(values: Iterable[float], share: float) -> str:
    """The quantile `share` of times, as text such as `12 ms`. A dash if there is no value."""
    found = sorted(values)
    if not found:
        return "-"
    value = found[min(len(found) - 1, int(len(found) * share))]
    return f"{value:.0f} ms" if value >= 10 else f"{value:.1f} ms"
