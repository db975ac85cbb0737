"""Writes a run as Markdown: bars and whether they are met, times, the split into steps, and
peers.
"""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from importlib import metadata

import psutil

from loadtests.harness.generator import ROOT
from loadtests.kv_bench import cases
from loadtests.kv_bench.report.figures import BARS, Figures, Spread

_SPLIT_MODES = (cases.WHOLE, cases.CHUNKED, cases.LAYERS)
_YARDSTICKS = {
    "memcpy": "raw memcpy",
    "perftest_poll": "ucx_perftest tag_bw, polling",
    "perftest_sleep": "ucx_perftest tag_bw, sleeping",
}
_PEERS = {
    "nixl_contiguous": "nixl, one range",
    "nixl_blocks": "nixl, block list",
    "nixl_told": "nixl, block list, told that it is there",
    "nixl_checked": "nixl, block list, told and checked as ours",
    "mooncake_contiguous": "mooncake, one range",
    "mooncake_blocks": "mooncake, block list",
}


def markdown(figures: Figures, command: str) -> str:
    num_rounds = len({r.round for r in figures.rows})
    about = (
        "Medians over rounds, lowest and highest in brackets; ratios are of two measurements of "
        "the same round. "
        f"{cases.NUM_LAYERS} layers, blocks of {cases.BLOCK_BYTES >> 10} KiB in random order, "
        f"prefill at {cases.TOKENS_PER_S:.0f} tokens/s of {cases.TOKEN_BYTES >> 10} KiB, at least "
        f"{cases.WEIGHTS_S * 1e3:.0f} ms. "
        "Ours includes xxh3 checksums on both sides; the baselines have none, and of the peers "
        "those that are called checked."
    )
    lines = [*head("KV transfer", command, num_rounds), about, "", *_bars(figures)]
    for transport in figures.transports:
        lines += [*_times(figures, transport), *_split(figures, transport)]
        lines += _peers(figures, transport)
    return "\n".join(lines) + "\n"


def head(title: str, command: str, rounds: int) -> Iterator[str]:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    versions = ", ".join(
        f"{n} {metadata.version(n)}" for n in ("ucxx-cu13", "libucx-cu13", "numpy")
    )
    yield f"# {title}, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    yield ""
    yield (
        f"`{command}`, {rounds} rounds, commit {commit}, {psutil.cpu_count()} cores, "
        f"{platform.machine()}, Python {platform.python_version()}, {versions}."
    )


def _bars(figures: Figures) -> Iterator[str]:
    yield from table_head(["bar", "limit", "transport", *map(_mib, figures.sizes)])
    for bar in BARS:
        for transport in figures.transports:
            cells = []
            for num_bytes in figures.sizes:
                value = bar.value(figures, transport, num_bytes)
                mark = "" if value is None or bar.is_met(value.median) else " **unmet**"
                cells.append(show(value, 2) + mark)
            if any(cells):
                yield row([bar.name, bar.limit, transport, *cells])
    yield ""


def _times(figures: Figures, transport: str) -> Iterator[str]:
    yield f"## {transport}: milliseconds from cache to cache"
    yield ""
    yield from table_head(["", *map(_mib, figures.sizes)])
    names = cases.LABELS | _YARDSTICKS
    for mode in [m for m in figures.modes if m in names]:
        is_after = mode in (cases.WHOLE_COMPUTED, cases.LAYERS_COMPUTED)
        column = "visible_ms" if is_after else "total_ms"
        cells = [show(figures.spread(transport, n, mode, column)) for n in figures.sizes]
        if any(cells):
            yield row([names[mode], *cells])
    yield ""
    yield "Share of ucx_perftest's rate (its faster way of waiting) that the whole transfer has:"
    yield ""
    yield from table_head(["utilisation", *map(_mib, figures.sizes)])
    for mode in (
        cases.BLOCKS_ACKED,
        cases.BLOCKS_PIPELINED,
        *_SPLIT_MODES,
        cases.WIRE,
        cases.WIRE_EMPTY,
    ):
        slower = [
            figures.ratio(transport, n, mode, ("perftest_poll", "perftest_sleep"))
            for n in figures.sizes
        ]
        yield row([cases.LABELS[mode], *(f"{100 / s.median:.0f} %" if s else "" for s in slower)])
    yield ""


def _split(figures: Figures, transport: str) -> Iterator[str]:
    yield f"## {transport}: where the time goes"
    yield ""
    yield (
        "Busy milliseconds of gather / wire / scatter (their sum exceeds the total where they "
        "overlap); CPU of sender + receiver."
    )
    yield ""
    yield from table_head(["", *map(_mib, figures.sizes)])
    for mode in _SPLIT_MODES:
        cells = []
        for n in figures.sizes:
            parts = [
                figures.spread(transport, n, mode, c)
                for c in ("gather_ms", "wire_ms", "scatter_ms")
            ]
            cells.append(" / ".join(number(p.median) if p else "-" for p in parts))
        yield row([cases.LABELS[mode], *cells])
    for mode in (
        cases.BLOCKS_ACKED,
        cases.BLOCKS_PIPELINED,
        *_SPLIT_MODES,
        cases.WIRE,
        cases.WIRE_EMPTY,
    ):
        cells = []
        for n in figures.sizes:
            cpus = [
                figures.spread(transport, n, mode, c) for c in ("cpu_sender_ms", "cpu_receiver_ms")
            ]
            cells.append(" + ".join(number(c.median) if c else "-" for c in cpus))
        yield row([f"CPU: {cases.LABELS[mode]}", *cells])
    yield ""


def _peers(figures: Figures, transport: str) -> Iterator[str]:
    yield f"## {transport}: other libraries, same sizes, same rounds"
    yield ""
    there = [mode for mode in figures.modes if mode in _PEERS]
    there = [m for m in there if any(figures.spread(transport, n, m) for n in figures.sizes)]
    if not there:
        yield "Not measured: none was named with --peer-python for this transport."
        yield ""
        return
    yield from table_head(["ms", *map(_mib, figures.sizes)])
    for mode in there:
        yield row(
            [_PEERS[mode], *(show(figures.spread(transport, n, mode)) for n in figures.sizes)]
        )
    yield from _against(figures, transport, there)
    yield ""


def _against(figures: Figures, transport: str, there: Sequence[str]) -> Iterator[str]:
    ranges = [m for m in there if m.endswith("contiguous")]
    blocks = [m for m in there if m.endswith("blocks")]
    checked = [m for m in there if m.endswith("checked")]
    for label, mode, others in (
        ("our payload alone / best one range", cases.WIRE, ranges),
        ("our whole model, cache to cache / best block list", cases.CHUNKED, blocks),
        ("our layer by layer, cache to cache / best block list", cases.LAYERS, blocks),
        (
            "our whole model, cache to cache / block list with the same checks",
            cases.CHUNKED,
            checked,
        ),
        (
            "our layer by layer, cache to cache / block list with the same checks",
            cases.LAYERS,
            checked,
        ),
    ):
        if not others:
            continue
        cells = [show(figures.ratio(transport, n, mode, others), 2) for n in figures.sizes]
        yield row([label, *cells])


def table_head(cells: Sequence[str]) -> Iterator[str]:
    yield row(cells)
    yield "|" + "---|" * len(cells)


def row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes >> 20} MiB"


def number(value: float, digits: int | None = None) -> str:
    if digits is None:
        digits = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{digits}f}"


def show(spread: Spread | None, digits: int | None = None) -> str:
    if spread is None:
        return ""
    low, high = number(spread.low, digits), number(spread.high, digits)
    return f"{number(spread.median, digits)} [{low}-{high}]"
