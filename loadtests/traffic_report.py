"""What a run of real load gave: a table, JSON and Markdown files and one page of plots (S138)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from loadtests import results
from loadtests.traffic import Answer

_QUANTILES = (0.5, 0.9, 0.95, 0.99)


@dataclass(frozen=True, slots=True)
class Slo:
    ttft_s: float
    tpot_s: float

    def is_met(self, answer: Answer) -> bool:
        return answer.is_answered and answer.ttft_s <= self.ttft_s and answer.tpot_s <= self.tpot_s


@dataclass(frozen=True, slots=True)
class Part:
    """All requests, or one scenario's. Quantiles p50, p90, p95, p99. Goodput: requests/s within the SLO."""

    name: str
    num_requests: int
    num_refused: int  # 429 and 503
    num_failed: int
    ttft_ms: tuple[float, ...]
    tpot_ms: tuple[float, ...]
    e2e_ms: tuple[float, ...]
    goodput_per_s: float
    within_slo_percent: float
    hit_percent: float  # of prompt tokens


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
    """The whole first, then each scenario."""
    span_s = max((a.sent_at for a in answers), default=0.0) or 1.0
    scenarios = sorted({a.arrival.scenario for a in answers})
    by_scenario = [
        part(s, [a for a in answers if a.arrival.scenario == s], slo, span_s) for s in scenarios
    ]
    return [part("all", answers, slo, span_s), *by_scenario]


def table(found: Sequence[Part]) -> str:
    lines = [
        "| scenario | requests | refused | failed | TTFT p50/p95/p99 ms | TPOT p50/p95 ms | E2E p50/p95 ms | goodput/s | in SLO % | hit % |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for p in found:
        ttft, tpot, e2e = p.ttft_ms, p.tpot_ms, p.e2e_ms
        lines.append(
            f"| {p.name} | {p.num_requests} | {p.num_refused} | {p.num_failed} | {ttft[0]:.0f}/{ttft[2]:.0f}/{ttft[3]:.0f} |"
            f" {tpot[0]:.1f}/{tpot[2]:.1f} | {e2e[0]:.0f}/{e2e[2]:.0f} | {p.goodput_per_s:.2f} |"
            f" {p.within_slo_percent:.1f} | {p.hit_percent:.1f} |"
        )
    return "\n".join(lines)


def write(
    answers: Sequence[Answer],
    admitted: Mapping[str, float],
    prediction_errors: Mapping[str, float],
    slo: Slo,
    out: Path | None,
) -> None:
    """Prints the table; with `out`, OUT.json, OUT.md and OUT.png too. `admitted`: prompts or streams by instance;
    `prediction_errors`: of the master's prefill times, by kind of instance."""
    found = parts(answers, slo)
    lag_ms = 1e3 * max((a.lag_s for a in answers), default=0.0)
    lines = [
        table(found),
        "",
        f"- statuses {dict(Counter(a.status for a in answers))}; the generator was {lag_ms:.0f} ms late at most",
        f"- admitted by instance: {dict(admitted)}",
        *(
            f"- the master predicted prefill times of {kind} within {error:.1%} lately (MAPE)"
            for kind, error in prediction_errors.items()
        ),
    ]
    text = "\n".join(lines)
    print(text)
    if out is None:
        return
    results.write(
        out,
        "loadtests.replay",
        "Real load, open loop",
        f"In the SLO: first token within {slo.ttft_s:g} s and {slo.tpot_s:g} s a token. Clients, mesh and servers share the cores.",
        text,
        slo=asdict(slo),
        generator_late_ms_max=lag_ms,
        admitted_by_instance=dict(admitted),
        prediction_error_by_kind=dict(prediction_errors),
        parts=[asdict(p) for p in found],
    )
    _draw(answers, found, admitted, out.with_suffix(".png"))


def _draw(
    answers: Sequence[Answer], found: Sequence[Part], admitted: Mapping[str, float], path: Path
) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    done = [a for a in answers if a.is_answered]
    figure, ((a, b, c), (d, e, f)) = plt.subplots(2, 3, figsize=(14, 7))
    for axis, values, label in (
        (a, [1e3 * x.ttft_s for x in done], "TTFT, ms"),
        (b, [1e3 * x.tpot_s for x in done if x.num_tokens > 1], "TPOT, ms"),
        (c, [1e3 * x.e2e_s for x in done], "E2E, ms"),
    ):
        axis.plot(sorted(values), [(i + 1) / len(values) for i in range(len(values))])
        axis.set_title(f"{label}: share of requests below")
    d.scatter([x.sent_at for x in done], [1e3 * x.ttft_s for x in done], s=4)
    d.set_title("TTFT, ms, over the run")
    names = [p.name for p in found]
    e.bar(names, [p.hit_percent for p in found])
    e.set_title("hit rate, % of prompt tokens")
    f.bar(list(admitted), list(admitted.values()))
    f.set_title("admitted by instance")
    for axis in (e, f):
        axis.tick_params(axis="x", rotation=60, labelsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
