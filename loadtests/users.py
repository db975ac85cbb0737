"""Users from A to 4A on a mesh of sim instances: on-demand forwarding against queues at the workers (S45, S62, S65).

    python -m loadtests.users --out loadtests/results/users-2026-11-21

Ours: prefills that accept or refuse, and a waiting room at the gateway. The baseline: the same prefills with a long queue
each, and the shortest one chosen by reports 100 ms old. Prompts share nothing, so that only the waiting differs.
Success: a first token within the SLO.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from loadtests.results import write
from loadtests.traffic import Answer, Target, closed_loop
from loadtests.workloads import Arrival
from pdmesh.engine.laws import SMOLLM2_CPU
from pdmesh.launcher.mesh import Mesh
from pdmesh.launcher.spec import MeshSpec

NUM_PREFILL: Final = 8
NUM_DECODE: Final = 2
PREFILL_SLOTS: Final = 2  # b_p: the next prompt computes while the last one's KV is taken
QUEUE: Final = 64
_WARM_S: Final = 3.0
NUM_TOKENS: Final = 384
# What n_p prefills can compute. Both slots share the engine, so T_p is b_p prompts' time.
CAPACITY_PER_S: Final = NUM_PREFILL / SMOLLM2_CPU.prefill_s(NUM_TOKENS)


@dataclass(frozen=True, slots=True)
class Variant:
    name: str
    policy: str
    prefill_slots: int


VARIANTS: Final = (
    Variant("on demand", "default", PREFILL_SLOTS),
    Variant("queues, shortest by 100 ms reports", "shortest_queue", QUEUE),
)


@dataclass(frozen=True, slots=True)
class Point:
    """`accepted_per_s`: answered requests; of `num_requests` that began within the window."""

    variant: str
    num_users: int
    success_percent: float
    accepted_per_s: float
    refused_percent: float
    ttft_ms_p50: float
    ttft_ms_p95: float
    ttft_ms_p99: float
    num_requests: int


def _spec(variant: Variant, slo_s: float) -> MeshSpec:
    shared = {"SIM_LAW": "smollm2-cpu", "SIM_EOS_PERIOD": "0"}
    prefill = {**shared, "NUM_SLOTS": str(variant.prefill_slots)}
    decode = {**shared, "NUM_SLOTS": "64", "MAX_RETRIEVALS": "64"}
    ttft_s = slo_s if variant.prefill_slots == PREFILL_SLOTS else 60.0
    return MeshSpec(
        engine="sim",
        num_prefill=NUM_PREFILL,
        num_decode=NUM_DECODE,
        http_port=0,
        grpc_port=0,
        service_env={
            "prefill": {f"PDMESH_PREFILL_{key}": value for key, value in prefill.items()},
            "decode": {f"PDMESH_DECODE_{key}": value for key, value in decode.items()},
            "master-scheduler": {"PDMESH_MASTER_SCHEDULER_POLICY": variant.policy},
            "gateway": {"PDMESH_GATEWAY_TTFT_S": str(ttft_s)},
        },
    )


def thinking(rng: random.Random, mean_s: float) -> Callable[[], float]:
    return lambda: rng.uniform(0.5 * mean_s, 1.5 * mean_s)


async def _measure(
    variant: Variant, users: Sequence[int], options: argparse.Namespace
) -> list[Point]:
    points = []
    with tempfile.TemporaryDirectory(prefix="pdmesh-users-") as directory:
        async with Mesh(_spec(variant, options.slo_s), Path(directory), report=_say) as mesh:
            url = urlsplit(mesh.http_url)
            assert url.hostname is not None
            assert url.port is not None
            target = Target(url.hostname, url.port)
            warm = argparse.Namespace(**{**vars(options), "duration_s": _WARM_S})
            await _point(variant, target, users[0], warm)  # connections, and what placement learns
            for num_users in users:
                points.append(await _point(variant, target, num_users, options))
                _say(f"{points[-1]}")
                await asyncio.sleep(1.0)  # let what was cut off end
    return points


async def _point(
    variant: Variant, target: Target, num_users: int, options: argparse.Namespace
) -> Point:
    # New prompts in each run, so that nothing is cached; small enough for a float to tell two apart.
    numbers = itertools.count(time.time_ns() // 1_000_000 % 10**9 * 100_000)
    answers = await closed_loop(
        target,
        num_users,
        lambda: Arrival(float(next(numbers)), NUM_TOKENS, 2),
        think_s=thinking(random.Random(num_users), options.think_s),
        duration_s=options.duration_s,
    )
    return summary(variant.name, num_users, answers, options.slo_s, options.duration_s)


def summary(
    name: str, num_users: int, answers: Sequence[Answer], slo_s: float, duration_s: float
) -> Point:
    """Without the first and last tenth of the run."""
    window = [a for a in answers if 0.1 * duration_s < a.sent_at < 0.9 * duration_s]
    done = sorted(a.ttft_s for a in window if a.is_answered)
    ended = [a for a in answers if a.is_answered]
    per_s = sum(0.1 * duration_s < a.sent_at + a.e2e_s < 0.9 * duration_s for a in ended) / (
        0.8 * duration_s
    )
    quantiles = [1e3 * done[int(q * (len(done) - 1))] if done else 0.0 for q in (0.5, 0.95, 0.99)]
    return Point(
        name,
        num_users,
        100 * sum(t <= slo_s for t in done) / max(1, len(window)),
        per_s,
        100 * (1 - len(done) / max(1, len(window))),
        quantiles[0],
        quantiles[1],
        quantiles[2],
        len(window),
    )


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _table(points: Sequence[Point]) -> str:
    lines = [
        "| variant | users | success % | answered/s | refused % | TTFT p50 ms | p95 | p99 | requests |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {p.variant} | {p.num_users} | {p.success_percent:.1f} | {p.accepted_per_s:.1f} | {p.refused_percent:.1f} |"
        f" {p.ttft_ms_p50:.0f} | {p.ttft_ms_p95:.0f} | {p.ttft_ms_p99:.0f} | {p.num_requests} |"
        for p in points
    ]
    return "\n".join(lines)


def _verdict(points: Sequence[Point]) -> str:
    """What was asked at the most users: S62 and S45."""
    most = max(p.num_users for p in points)
    success = {p.variant: p.success_percent for p in points if p.num_users == most}
    ours, queues = (success[variant.name] for variant in VARIANTS)
    (accepted,) = (
        p.accepted_per_s for p in points if (p.variant, p.num_users) == (VARIANTS[0].name, most)
    )
    share = accepted / CAPACITY_PER_S
    return (
        f"At {most} users: success {ours:.1f} % on demand (bar 99: {_met(ours >= 99)}) and {queues:.1f} % with queues (bar: below 70: {_met(queues < 70)};"
        f" the paper's fell to 57). On demand answered {accepted:.1f} requests/s, {share:.2f} of n_p b_p / T_p (bar: within 0.10 of 1: {_met(abs(share - 1) <= 0.10)})."
    )


def _met(is_met: bool) -> str:
    return "met" if is_met else "**not met**"


def _draw(points: Sequence[Point], slo_s: float, path: Path) -> None:
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--users", default="18,36,54,72", help="A to 4A")
    parser.add_argument("--slo-s", type=float, default=0.6)
    parser.add_argument("--think-s", type=float, default=1.0)
    parser.add_argument("--duration-s", type=float, default=15.0)
    parser.add_argument("--out", type=Path, help="write OUT.json, OUT.md and OUT.png")
    options = parser.parse_args()
    users = [int(each) for each in options.users.split(",")]
    points = [
        point for variant in VARIANTS for point in asyncio.run(_measure(variant, users, options))
    ]
    text = f"{_table(points)}\n\n{_verdict(points)}"
    print(text)
    if options.out:
        write(
            options.out,
            "loadtests.users",
            "Users from A to 4A",
            f"{NUM_PREFILL} prefills, {NUM_DECODE} decodes, sim at the law `smollm2-cpu`, prompts of {NUM_TOKENS} tokens that share nothing,"
            f" answers of 2; real processes, real KV transfer. n_p b_p / T_p is {CAPACITY_PER_S:.1f} requests/s. Success: first token within"
            f" {options.slo_s} s.",
            text,
            capacity_per_s=CAPACITY_PER_S,
            points=[asdict(point) for point in points],
        )
        _draw(points, options.slo_s, options.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
