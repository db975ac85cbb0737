"""Writes a run of overhead.py as Markdown.

The page begins with the bars (promised limits and whether they are met). Next comes the simplest
gateway as a comparison, then the measurements.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from loadtests.gateway.scenarios import (
    LOW_LOAD,
    LOW_LOAD_REAL,
    ONE_STREAM,
    Kind,
    Scenario,
)
from loadtests.harness.results import Cell, Run, Spread

_TTFT_BAR_MS: Final = 2.0
_REQUESTS_BAR: Final = 2000.0
_TOKENS_BAR: Final = 100_000.0
_STALL_BAR: Final = 0.001
_BEST_CONCURRENCIES: Final = (64, 256)


@dataclass(frozen=True, slots=True)
class Bar:
    """A promised limit, and the value of each round.

    The bar is met if the median of the rounds is within `limit`.
    """

    name: str
    wanted: str
    form: str  # the format of the value
    limit: float
    rounds: Sequence[float]
    is_least: bool = True  # whether `limit` is a minimum; otherwise it is a maximum

    @property
    def measured(self) -> str:
        return Spread.of(self.rounds).text(self.form)

    @property
    def verdict(self) -> str:
        if self._is_within(statistics.median(self.rounds)):
            return "yes"
        met = sum(map(self._is_within, self.rounds))
        return f"**no**, in {met} of {len(self.rounds)} rounds"

    def _is_within(self, value: float) -> bool:
        return value >= self.limit if self.is_least else value <= self.limit


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)


def low_load(run: Run) -> Scenario:
    return LOW_LOAD if run.engine == "sim" else LOW_LOAD_REAL


def added_ttft_ms(run: Run, scenario: Scenario, quantile: int = 0) -> list[float]:
    """The TTFT of the mesh minus that of the bare engine in each round.

    `quantile` 0, 1 or 2 selects p50, p90 or p99. The list is empty if the run did not measure it.
    """
    alone = run.cells(scenario.name)
    if len(alone) != len(run.bare):
        return []
    return [
        cell.ttft_ms[quantile] - bare.ttft_ms[quantile]
        for cell, bare in zip(alone, run.bare, strict=True)
    ]


def added_per_token_us(run: Run) -> Spread | None:
    """How much longer a token of a single stream takes in the mesh than in the bare engine."""
    alone = run.cells(low_load(run).name)
    if not alone or len(alone) != len(run.bare):
        return None
    tokens_after_first = low_load(run).kind.num_tokens - 1
    return Spread.of(
        [
            (cell.latency_ms[0] - cell.ttft_ms[0]) * 1e3 / tokens_after_first - bare.per_token_us
            for cell, bare in zip(alone, run.bare, strict=True)
        ]
    )


def bars(run: Run) -> list[Bar]:
    """The bars that this run measured. Their limits are for a machine with 2 cores."""
    low, most = low_load(run), f"<= {_TTFT_BAR_MS:g} ms"
    tokens = [cell.tokens_per_s for cell in run.cells(Scenario(Kind.STREAM, 64).name)]
    found = [
        Bar("added TTFT p50, ms, one stream", most, ".2f", _TTFT_BAR_MS,
            added_ttft_ms(run, ONE_STREAM), is_least=False),
        Bar(f"added TTFT p50, ms, one stream, pauses of {low.pauses}", most, ".2f", _TTFT_BAR_MS,
            added_ttft_ms(run, low), is_least=False),
        *(
            Bar(f"requests/s, {kind.value}", f">= {_REQUESTS_BAR:,.0f}", ",.0f", _REQUESTS_BAR,
                _best(run, kind))
            for kind in (Kind.ONE_TOKEN, Kind.HANDOVER)
        ),
        Bar("streamed tokens/s, 64 x 128", f">= {_TOKENS_BAR:,.0f}", ",.0f", _TOKENS_BAR, tokens),
    ]  # fmt: skip
    if run.engine == "sim":  # a real model's steps may themselves take 40 ms
        stalls = [cell.stall_share for cell in run.cells(low.name)]
        name = "share of stalls of 35-60 ms, low load"
        found.append(Bar(name, "none", ".3%", _STALL_BAR, stalls, is_least=False))
    return [bar for bar in found if bar.rounds]


def _best(run: Run, kind: Kind) -> list[float]:
    """Requests/s in each round, at the high concurrency with the best median."""
    rates = [
        [cell.requests_per_s for cell in cells]
        for c in _BEST_CONCURRENCIES
        if (cells := run.cells(Scenario(kind, c).name))
    ]
    return max(rates, key=statistics.median, default=[])


def markdown(run: Run) -> str:
    parts = [
        f"# Overhead of the mesh, {run.began[:10]}, engine {run.engine}",
        _how(run),
        "## Bars",
        table(
            ("what", "bar", "measured: median (low..high of rounds)", "met"),
            [(b.name, b.wanted, b.measured, b.verdict) for b in bars(run)],
        ),
        *_beside_passthrough(run),
        *_bare(run),
        "## Throughput",
        _throughput(run),
        "## CPU seconds by process",
        _by_process(run),
        *_ceiling(run),
    ]
    return "\n\n".join(parts) + "\n"


def _how(run: Run) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in run.versions.items())
    dropped = (
        f"{run.num_dropped} windows were dropped because other processes used more than a quarter"
        " of a core"
    )
    return "\n".join(
        (
            f"- Command: `{run.command}`",
            f"- Mesh: {run.mesh}. Prompts: {run.prompt}. {len(run.rounds)} rounds.",
            f"- Machine: {run.machine}; load average before: {run.load_before[0]:.2f}.",
            f"- Mesh and generator share the cores; {dropped}.",
            f"- Versions: {versions}.",
        )
    )


def _beside_passthrough(run: Run) -> list[str]:
    """Compare the mesh with the simplest gateway.

    A slow machine slows both alike. So their ratio can be compared with the ratio of a run on
    another day.
    """
    compared: tuple[tuple[str, Scenario, Callable[[Cell], float], str], ...] = (
        ("requests/s, 1 token x 64", Scenario(Kind.ONE_TOKEN, 64), lambda c: c.requests_per_s,
            ",.0f"),
        ("TTFT p50, ms, one stream", ONE_STREAM, lambda c: c.ttft_ms[0], ".2f"),
        ("tokens/s, 64 x 128", Scenario(Kind.STREAM, 64), lambda c: c.tokens_per_s, ",.0f"),
    )  # fmt: skip
    rows = []
    for name, scenario, value, form in compared:
        theirs = [value(cell) for cell in run.passed_through(scenario.name)]
        ours = [value(cell) for cell in run.cells(scenario.name)]
        if theirs and len(theirs) == len(ours):
            ratio = Spread.of([o / t for o, t in zip(ours, theirs, strict=True)])
            spreads = (Spread.of(theirs).text(form), Spread.of(ours).text(form), ratio.text(".2f"))
            rows.append((name, *spreads))
    if not rows:
        return []
    head = ("", "aiohttp passthrough", "pdmesh", "pdmesh / passthrough")
    about = (
        "The passthrough (`loadtests/harness/passthrough.py`) has canned answers behind it and "
        "passes bytes on: no tokenizer, no"
        " placement, no prefill, no decode. It was measured in the same minutes as pdmesh."
    )
    return ["## Beside the simplest gateway, in the same minutes", about, table(head, rows)]


def _bare(run: Run) -> list[str]:
    per_token = added_per_token_us(run)
    if per_token is None:
        return []
    alone = run.cells(low_load(run).name)
    rows = []
    for i, name in enumerate(("p50", "p90", "p99")):
        bare = Spread.of([bare.ttft_ms[i] for bare in run.bare])
        mesh = Spread.of([cell.ttft_ms[i] for cell in alone])
        added = Spread.of(added_ttft_ms(run, low_load(run), i))
        rows.append((f"TTFT {name}, ms", *(s.text(".2f") for s in (bare, mesh, added))))
    bare_token = Spread.of([bare.per_token_us for bare in run.bare])
    rows.append(
        ("per token after the first, us", bare_token.text(".1f"), "", per_token.text(".1f"))
    )
    return [
        "## Added at low load (one stream at a time, a pause before each)",
        table(("", "bare engine", "mesh", "added"), rows),
    ]


def _throughput(run: Run) -> str:
    head = (
        "answer x connections", "requests/s", "tokens/s", "TTFT p50 / p99 ms",
        "latency p50 / p99 ms",
        "mesh CPU-s per 1k requests", "per 1M tokens", "35-60 ms", "tokens per event",
        "cores taken by others", "errors",
    )  # fmt: skip
    return table(head, [_throughput_row(run.cells(name)) for name in run.scenarios()])


def _throughput_row(cells: list[Cell]) -> tuple[str, ...]:
    def middle(value: Callable[[Cell], float]) -> float:
        return statistics.median([value(cell) for cell in cells])

    return (
        cells[0].scenario,
        Spread.of([cell.requests_per_s for cell in cells]).text(",.0f"),
        Spread.of([cell.tokens_per_s for cell in cells]).text(",.0f"),
        f"{middle(lambda c: c.ttft_ms[0]):.2f} / {middle(lambda c: c.ttft_ms[2]):.2f}",
        f"{middle(lambda c: c.latency_ms[0]):.2f} / {middle(lambda c: c.latency_ms[2]):.2f}",
        f"{middle(lambda c: c.mesh_cpu_s_per_1k_requests):.3f}",
        f"{middle(lambda c: c.mesh_cpu_s_per_1m_tokens):.1f}",
        f"{middle(lambda c: c.stall_share):.2%}",
        _tokens_per_event(cells),
        f"{middle(lambda c: c.others_cores):.2f}",
        str(sum(sum(cell.errors.values()) + cell.num_stuck for cell in cells)),
    )


def _tokens_per_event(cells: list[Cell]) -> str:
    """The mean number of tokens in an event of a stream.

    Each stream also has four events without tokens, which do not count.
    """
    events = sum(cell.num_events - 4 * cell.num_requests for cell in cells)
    tokens = sum(round(cell.tokens_per_s * cell.window_s) for cell in cells)
    return f"{tokens / events:.1f}" if events > 0 else ""


def _by_process(run: Run) -> str:
    """The CPU of each process in each scenario, in cores."""
    names = list(dict.fromkeys(name for cells in run.rounds for c in cells for name in c.cpu_s))
    rows = []
    for scenario in run.scenarios():
        cells = run.cells(scenario)
        shares = [
            statistics.median([c.cpu_s.get(n, 0.0) / c.window_s for c in cells]) for n in names
        ]
        rows.append((scenario, *(f"{share:.2f}" for share in shares), f"{sum(shares):.2f}"))
    return "Cores used by each process.\n\n" + table(("", *names, "all"), rows)


def _ceiling(run: Run) -> list[str]:
    """The generator's ceiling: how much it can send to a server of canned answers.

    The ceiling also shows how fast the machine was, since other load on the host lowers it.
    """
    rows = []
    for scenario in dict.fromkeys(cell.scenario for cell in run.ceiling):
        cells = [cell for cell in run.ceiling if cell.scenario == scenario and cell.num_requests]
        costs = [cell.cpu_s["generator"] / cell.num_requests * 1e3 for cell in cells]
        rows.append(
            (
                scenario,
                Spread.of([cell.requests_per_s for cell in cells]).text(",.0f"),
                Spread.of([cell.tokens_per_s for cell in cells]).text(",.0f"),
                Spread.of(costs).text(".3f"),
            )
        )
    head = ("answer x connections", "requests/s", "tokens/s", "generator CPU-s per 1k requests")
    return [
        "## The generator's own ceiling (a server of canned answers, once a round)",
        table(head, rows),
    ]
