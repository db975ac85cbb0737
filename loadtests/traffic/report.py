"""The report of a run of real load: a table, JSON and Markdown files, and one page of plots
(S138).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from loadtests.harness import results
from loadtests.traffic.loops import Answer

_QUANTILES = (0.5, 0.9, 0.95, 0.99)


@dataclass(frozen=True, slots=True)
class Slo:
    ttft_s: float
    tpot_s: float

    def is_met(self, answer: Answer) -> bool:
        return answer.is_answered and answer.ttft_s <= self.ttft_s and answer.tpot_s <= self.tpot_s


@dataclass(frozen=True, slots=True)
class Part:
    """The results of all requests, or of one scenario's.

    Quantiles are p50, p90, p95 and p99. Goodput is in requests/s within the SLO.
    """

    name: str
    num_requests: int
    num_refused: int  # answers 429 and 503
    num_failed: int
    ttft_ms: tuple[float, ...]
    tpot_ms: tuple[float, ...]
    e2e_ms: tuple[float, ...]
    goodput_per_s: float
    within_slo_percent: float
    hit_percent: float  # share of the prompt tokens


def part(name: str, answers: Sequence[Answer], slo: Slo, span_s: float) -> Part:
    done = [a for a in answers if a.is_answered]
    refused = sum(a.status in (429, 503) for a in answers)
    good = sum(slo.is_met(a) for a in answers)
    prompt = sum(a.arrival.num_prompt_tokens for a in done)
    return Part(
        name,
        len(answers),
        refused,
        len(answers) - len(done) - refused,
        _quantiles([1e3 * a.ttft_s for a in done]),
        _quantiles([1e3 * a.tpot_s for a in done if a.num_tokens > 1]),
        _quantiles([1e3 * a.e2e_s for a in done]),
        good / span_s,
        100 * good / max(1, len(answers)),
        100 * sum(a.num_cached_tokens for a in done) / max(1, prompt),
    )


def _quantiles(values: Sequence[float]) -> tuple[float, ...]:
    ordered = sorted(values) or [0.0]
    return tuple(ordered[int(q * (len(ordered) - 1))] for q in _QUANTILES)


def parts(answers: Sequence[Answer], slo: Slo) -> list[Part]:
    """The results of the whole run first, then of each scenario."""
    span_s = max((a.sent_at for a in answers), default=0.0) or 1.0
    scenarios = sorted({a.arrival.scenario for a in answers})
    by_scenario = [
        part(s, [a for a in answers if a.arrival.scenario == s], slo, span_s) for s in scenarios
    ]
    return [part("all", answers, slo, span_s), *by_scenario]


def table(found: Sequence[Part]) -> str:
    lines = [
        (
            "| scenario | requests | refused | failed | TTFT p50/p95/p99 ms | TPOT p50/p95 ms | "
            "E2E p50/p95 ms | goodput/s | in SLO % | hit % |"
        ),
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for p in found:
        ttft, tpot, e2e = p.ttft_ms, p.tpot_ms, p.e2e_ms
        lines.append(
            f"| {p.name} | {p.num_requests} | {p.num_refused} | {p.num_failed} | "
            f"{ttft[0]:.0f}/{ttft[2]:.0f}/{ttft[3]:.0f} |"
            f" {tpot[0]:.1f}/{tpot[2]:.1f} | {e2e[0]:.0f}/{e2e[2]:.0f} | {p.goodput_per_s:.2f} |"
            f" {p.within_slo_percent:.1f} | {p.hit_percent:.1f} |"
        )
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Run:
    """The answers of one run, and what the mesh reports about it.

    `admitted` is the number of prompts or streams by instance. `rejections` is the number of calls
    by how many prefills rejected them, from the gateways' histograms. `prediction_errors` is the
    mean relative error of the master's prefill times, by kind of instance. All three are empty for
    a mesh that this program did not start.

    `ceiling_per_s` is the most that the generator can send. With 0, it was not measured.
    """

    answers: Sequence[Answer]
    admitted: Mapping[str, float] = field(default_factory=dict)
    rejections: Mapping[str, float] = field(default_factory=dict)
    prediction_errors: Mapping[str, float] = field(default_factory=dict)
    ceiling_per_s: float = 0.0

    @property
    def late_ms(self) -> float:
        """How late the latest request was sent."""
        return 1e3 * max((a.lag_s for a in self.answers), default=0.0)

    @property
    def peak_per_s(self) -> int:
        """The most requests that were sent in one second."""
        return max(Counter(int(a.sent_at) for a in self.answers).values(), default=0)


def write(run: Run, slo: Slo, out: Path | None) -> None:
    """Print the table. If `out` is given, also write OUT.json, OUT.md and OUT.png."""
    found = parts(run.answers, slo)
    statuses = dict(sorted(Counter(a.status for a in run.answers).items()))
    ceiling = f", alone it carries {run.ceiling_per_s:.0f}" if run.ceiling_per_s else ""
    lines = [
        table(found),
        "",
        f"- statuses (0: no answer) {statuses}",
        (
            f"- the generator sent {run.peak_per_s} requests in its busiest second{ceiling}; it "
            f"was {run.late_ms:.0f} ms late at most"
        ),
    ]
    if run.admitted:
        lines += [
            f"- admitted by instance: {dict(run.admitted)}",
            f"- calls by the prefills that refused them: {dict(run.rejections)}",
        ]
    lines += [
        f"- the master predicted prefill times of {kind} within {error:.1%} lately (MAPE)"
        for kind, error in run.prediction_errors.items()
    ]
    text = "\n".join(lines)
    print(text)
    if out is None:
        return
    results.write(
        out,
        "loadtests.traffic.replay",
        "Real load, open loop",
        f"In the SLO: first token within {slo.ttft_s:g} s and {slo.tpot_s:g} s a token. Clients, "
        "mesh and servers share the cores.",
        text,
        slo=asdict(slo),
        statuses=statuses,
        generator_late_ms_max=run.late_ms,
        generator_peak_per_s=run.peak_per_s,
        generator_ceiling_per_s=run.ceiling_per_s,
        admitted_by_instance=dict(run.admitted),
        calls_by_rejections=dict(run.rejections),
        prediction_error_by_kind=dict(run.prediction_errors),
        parts=[asdict(p) for p in found],
    )
    from loadtests.traffic.page import draw  # matplotlib takes a second to import

    draw(run, found, slo, out.with_suffix(".png"))
