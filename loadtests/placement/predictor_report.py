"""Judges the master's predictor by recorded reports of instances.

The master's own core gets the reports again, and its predictions are compared with the reported
times. The report also has two yardsticks. One is a mean rate: seconds per computed token of all
spans so far. (A span is a set of prompts that an instance times together.) The other is the noise
floor: each prompt is predicted as the median of the other prompts with the same numbers of tokens.
In the long run, no predictor that knows only tokens can be better than the noise floor.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from pdmesh.core.model import Role
from pdmesh.core.placement.fleet import Fleet, InstanceRecorded, LoadReported, PrefillComputed
from pdmesh.core.placement.instance import Identity
from pdmesh.core.placement.predictor import PromptTokens

T = TypeVar("T", "Span", "_First")

LEARN: Final = "learn"
_FEW: Final = 3  # least number of prompts with the same numbers of tokens for the noise floor


@dataclass(frozen=True, slots=True)
class Reported:
    """A load report.

    Each entry of `computed` has tokens, cached tokens, seconds, steps, and sequences beside the
    prompt.
    """

    site: str
    trace: str
    instance_id: str
    at: float
    num_slots_used: int
    computed: Sequence[tuple[int, int, float, int, float]]


@dataclass(frozen=True, slots=True)
class Ended:
    """A request that has ended. Times are in seconds since it came.

    `expected_s` begins at the plan. It is 0 if it is not known.
    """

    site: str
    trace: str
    outcome: str
    num_tokens: int
    num_cached_tokens: int
    num_rejections: int
    planned_s: float
    ttft_s: float
    expected_s: float


@dataclass(frozen=True, slots=True)
class Round:
    """The reports of one mesh per site, in order. `conditions` says when and under which load."""

    reported: list[Reported]
    ended: list[Ended]
    conditions: str = ""


@dataclass(frozen=True, slots=True)
class Span:
    """Prompts that were timed together. Their time was predicted before the predictor learnt it."""

    site: str
    trace: str
    prompts: tuple[PromptTokens, ...]
    seconds: float
    num_beside: float
    predicted_s: float
    by_rate_s: float

    @property
    def error(self) -> float:
        return abs(self.predicted_s - self.seconds) / self.seconds

    @property
    def rate_error(self) -> float:
        return abs(self.by_rate_s - self.seconds) / self.seconds

    @property
    def num_computed(self) -> int:
        return sum(p.num_tokens - p.num_reused for p in self.prompts)


def judged(reported: Sequence[Reported]) -> list[Span]:
    """All spans, in order. Each site has a new fleet, which knows nothing."""
    spans: list[Span] = []
    for site in dict.fromkeys(r.site for r in reported):
        spans += _judged_site([r for r in reported if r.site == site])
    return spans


def _judged_site(reported: Sequence[Reported]) -> Iterator[Span]:
    fleet, rate = Fleet(), _Rate()
    for report in reported:
        name = report.instance_id
        if name not in fleet.instances:
            fleet.handle(InstanceRecorded(_identity(name)), report.at)
        instance = fleet.instances[name]
        fit, prompts = fleet.predictor.fit(instance.kind), list(instance.untimed)
        for each in report.computed:
            computed = PrefillComputed("", *each)
            if computed.num_tokens:
                prompts.append(PromptTokens(computed.num_tokens, computed.num_cached_tokens))
            if computed.seconds > 0 and prompts:
                found = fit.span_s(prompts, max(1, computed.num_steps), computed.num_beside or 0.0)
                span = Span(
                    report.site,
                    report.trace,
                    tuple(prompts),
                    computed.seconds,
                    computed.num_beside or 0.0,
                    found * instance.slowness,
                    rate.of(prompts),
                )
                yield span
                rate.add(span)
                prompts.clear()
            load = LoadReported(name, 1, 8, report.num_slots_used, 0, False, (), (computed,))
            fleet.handle(load, report.at)


def _identity(name: str) -> Identity:
    role = Role(name.rpartition("-")[0])
    return Identity(name, 1, role, "g", "default", "m", "f", 64, 8, 0, 0)


@dataclass(slots=True)
class _Rate:
    seconds: float = 0.0
    num_tokens: int = 0

    def add(self, span: Span) -> None:
        self.seconds += span.seconds
        self.num_tokens += span.num_computed

    def of(self, prompts: Sequence[PromptTokens]) -> float:
        return self.of_tokens(sum(p.num_tokens - p.num_reused for p in prompts))

    def of_tokens(self, num_tokens: int) -> float:
        return self.seconds / max(1, self.num_tokens) * num_tokens


def noise_floor(spans: Sequence[Span]) -> list[tuple[Span, float]]:
    """The noise floor: spans of one prompt, each with its relative error.

    The error compares the span with the median of other spans with the same numbers of tokens.
    There must be at least `_FEW` of these spans.
    """
    alike: dict[tuple[str, str, PromptTokens], list[Span]] = {}
    for span in spans:
        if len(span.prompts) == 1:
            alike.setdefault((span.site, span.trace, span.prompts[0]), []).append(span)
    found = []
    for group in alike.values():
        if len(group) >= _FEW:
            for place, span in enumerate(group):
                others = [s.seconds for s in (*group[:place], *group[place + 1 :])]
                error = abs(statistics.median(others) - span.seconds) / span.seconds
                found.append((span, error))
    return found


def report(rounds: Sequence[Round]) -> str:
    by_round = [judged(each.reported) for each in rounds]
    floor = [
        pair
        for spans in by_round
        for pair in noise_floor([s for s in spans if s.trace.startswith("repeats")])
    ]
    firsts = [first for each in rounds for first in _first_tokens(each.ended)]
    parts = [
        "\n".join(f"- {each.conditions}" for each in rounds),
        _spans_table([span for spans in by_round for span in spans]),
        _floor_table(floor),
        _first_tokens_table(firsts),
    ]
    return "\n\n".join(parts)


def _spans_table(spans: Sequence[Span]) -> str:
    lines = [
        "## Time of compute\n",
        "Of a span of prompts, predicted from what was learnt before it.\n",
        "| computed by | requests | spans | median ms | MAPE | its median | mean rate |",
        "|---|---|---|---|---|---|---|",
    ]
    for site, trace, own in _rows(spans):
        lines.append(
            f"| {site} | {trace} | {len(own)} | {1e3 * _median(s.seconds for s in own):.0f} "
            f"| {_percent(s.error for s in own)} | {100 * _median(s.error for s in own):.1f} "
            f"| {_percent(s.rate_error for s in own)} |"
        )
    return "\n".join(lines)


def _floor_table(floor: Sequence[tuple[Span, float]]) -> str:
    lines = [
        "## Noise floor\n",
        (
            "The same prompts again: `floor` is the MAPE of the median of the others of the same "
            "tokens, which knows their times, also the later ones.\n"
        ),
        "| computed by | requests | prompts | MAPE | its median | floor | its median |",
        "|---|---|---|---|---|---|---|",
    ]
    for site, trace in dict.fromkeys((s.site, s.trace) for s, _ in floor):
        own = [(s, e) for s, e in floor if (s.site, s.trace) == (site, trace)]
        lines.append(
            f"| {site} | {trace} | {len(own)} | {_percent(s.error for s, _ in own)} "
            f"| {100 * _median(s.error for s, _ in own):.1f} "
            f"| {_percent(e for _, e in own)} | {100 * _median(e for _, e in own):.1f} |"
        )
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class _First:
    """The time from the plan to token 1, and the errors of the master's expectation and of the mean
    rate.
    """

    site: str
    trace: str
    seconds: float
    error: float
    rate_error: float


def _first_tokens(ended: Sequence[Ended]) -> Iterator[_First]:
    rates: dict[str, _Rate] = {}
    for e in ended:
        seconds, num_computed = e.ttft_s - e.planned_s, e.num_tokens - e.num_cached_tokens
        if e.outcome != "completed" or e.expected_s <= 0 or seconds <= 0 or e.num_rejections:
            continue
        rate = rates.setdefault(e.site, _Rate())
        by_rate_s = rate.of_tokens(num_computed)
        yield _First(
            e.site,
            e.trace,
            seconds,
            abs(e.expected_s / seconds - 1),
            abs(by_rate_s / seconds - 1),
        )
        rate.seconds += seconds
        rate.num_tokens += num_computed


def _first_tokens_table(firsts: Sequence[_First]) -> str:
    lines = [
        "## From the plan to the first token\n",
        (
            "As the master expected it with the plan, from the prompts that wait there and "
            "from the compute. The mean rate knows the tokens that were reused in the end, and no "
            "wait.\n"
        ),
        "| computed by | requests | number | median ms | MAPE | its median | mean rate |",
        "|---|---|---|---|---|---|---|",
    ]
    for site, trace, own in _rows(firsts):
        lines.append(
            f"| {site} | {trace} | {len(own)} | {1e3 * _median(e.seconds for e in own):.0f} "
            f"| {_percent(e.error for e in own)} | {100 * _median(e.error for e in own):.1f} "
            f"| {_percent(e.rate_error for e in own)} |"
        )
    return "\n".join(lines)


def _rows(items: Sequence[T]) -> Iterator[tuple[str, str, list[T]]]:
    """Table rows: for each site, each trace, then all traces except the one for learning."""
    for site in dict.fromkeys(i.site for i in items):
        own = [i for i in items if i.site == site]
        for trace in dict.fromkeys(i.trace for i in own):
            yield site, trace, [i for i in own if i.trace == trace]
        yield site, "**all judged**", [i for i in own if i.trace != LEARN]


def _percent(values: Iterable[float]) -> str:
    return f"{100 * statistics.mean(values):.1f}"


def _median(values: Iterable[float]) -> float:
    return statistics.median(values)
