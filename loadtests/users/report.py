"""Reports the runs with users: a point for each variant and number of users, and the figure.

The report also says whether the values that requirements ask for are reached.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from loadtests.harness.results import quantile
from loadtests.traffic.loops import Answer
from loadtests.users.plan import CAPACITY_PER_S, ON_DEMAND, QUEUES

_EDGE = 0.1  # this share of a run at its beginning and at its end is not counted


@dataclass(frozen=True, slots=True)
class Point:
    """The result of one variant with one number of users.

    All values are of the window, which is the run without its first and its last tenth.
    `success_percent` is the share of the `num_requests` sent in the window whose first token met
    the SLO. `accepted_per_s` is the rate of answered requests.
    """

    variant: str
    num_users: int
    success_percent: float
    accepted_per_s: float
    refused_percent: float
    hit_percent: float
    ttft_ms_p50: float
    ttft_ms_p95: float
    ttft_ms_p99: float
    num_requests: int


def point(
    variant: str, num_users: int, answers: Sequence[Answer], slo_s: float, duration_s: float
) -> Point:
    """The point of one run, without the run's first and last tenth."""
    first, last = _EDGE * duration_s, (1 - _EDGE) * duration_s
    sent = [a for a in answers if first < a.sent_at < last]
    done = [a for a in sent if a.is_answered]
    ended = sum(first < a.sent_at + a.e2e_s < last for a in answers if a.is_answered)
    ttfts = sorted(a.ttft_s for a in done) or [0.0]
    p50, p95, p99 = (1e3 * quantile(ttfts, q) for q in (0.5, 0.95, 0.99))
    num_prompt_tokens = sum(a.arrival.num_prompt_tokens for a in done)
    return Point(
        variant,
        num_users,
        100 * sum(a.ttft_s <= slo_s for a in done) / max(1, len(sent)),
        ended / (last - first),
        100 * (1 - len(done) / max(1, len(sent))),
        100 * sum(a.num_cached_tokens for a in done) / max(1, num_prompt_tokens),
        p50,
        p95,
        p99,
        len(sent),
    )


def table(points: Sequence[Point]) -> str:
    lines = [
        (
            "| variant | users | success % | answered/s | refused % | hit % | TTFT p50 ms | p95 | "
            "p99 | requests |"
        ),
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {p.variant} | {p.num_users} | {p.success_percent:.1f} | {p.accepted_per_s:.1f} | "
        f"{p.refused_percent:.1f} | {p.hit_percent:.0f} |"
        f" {p.ttft_ms_p50:.0f} | {p.ttft_ms_p95:.0f} | {p.ttft_ms_p99:.0f} | {p.num_requests} |"
        for p in points
    ]
    return "\n".join(lines)


def bars(points: Sequence[Point]) -> str:
    """A line for each bar (S62, S45): the result with the most users, and whether it meets the
    bar.
    """
    most = max(p.num_users for p in points)
    at_most = {p.variant: p for p in points if p.num_users == most}
    ours, queues = at_most[ON_DEMAND.name], at_most[QUEUES.name]
    share = ours.accepted_per_s / CAPACITY_PER_S
    found = (
        (
            f"success on demand {ours.success_percent:.1f} %",
            "at least 99",
            ours.success_percent >= 99,
        ),
        (
            f"success with queues {queues.success_percent:.1f} %",
            "below 70; the paper's fell to 57",
            queues.success_percent < 70,
        ),
        (
            (
                f"answered on demand {ours.accepted_per_s:.1f} requests/s, {share:.2f} of n_p b_p "
                "/ T_p"
            ),
            "within 0.10 of 1",
            abs(share - 1) <= 0.10,
        ),
    )
    lines = [
        f"- {what} (bar: {bar}): {'met' if is_met else '**not met**'}"
        for what, bar, is_met in found
    ]
    return "\n".join([f"At {most} users:", "", *lines])


def draw(points: Sequence[Point], slo_s: float, path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(14, 4))
    panels = (
        ("success_percent", f"first token within {slo_s} s, %"),
        ("accepted_per_s", "answered, requests/s"),
        ("ttft_ms_p95", "TTFT p95, ms"),
    )
    for axis, (field, label) in zip(axes, panels, strict=True):
        for variant in dict.fromkeys(p.variant for p in points):
            own = [p for p in points if p.variant == variant]
            axis.plot(
                [p.num_users for p in own], [getattr(p, field) for p in own], "o-", label=variant
            )
        axis.set_xlabel("users")
        axis.set_title(label)
    axes[1].axhline(CAPACITY_PER_S, linestyle="--", color="black", label="n_p b_p / T_p")
    for axis in axes:
        axis.set_ylim(bottom=0)
        axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
