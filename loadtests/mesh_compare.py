"""Placement policies side by side on a real mesh of sim instances: the same arrivals, >= 3 seeds, one table with spread.

    make compare-mesh TRACES=FOLDER ARGS="--out loadtests/results/mesh-compare-2026-11-21"
    python -m loadtests.mesh_compare --policies default,kv_router --seeds 1 --replay "--workload scenarios --rate 12"

One run after the other, each on a mesh of its own, seed by seed, so that all policies meet the same minutes of the machine. Each run is a
line in OUT.jsonl as soon as it is over, and is not repeated: an interrupted comparison goes on where it was. By default the
Mooncake conversation trace, its lengths and times scaled, its 3 s ticks spread anew by each seed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from loadtests import replay
from loadtests.results import spread_table, write
from loadtests.traffic_report import Slo, part
from pdmesh.core.placement_baselines import POLICIES

TRACE: Final = (
    "--workload mooncake --jitter --first 300 --time 0.2 --lengths 0.02 --prefill 4 --decode 2"
)


@dataclass(frozen=True, slots=True)
class Run:
    """One policy under one seed. `load_max_over_mean`: prompts admitted, over the prefills."""

    policy: str
    seed: int
    replay: str
    goodput_per_s: float
    within_slo_percent: float
    ttft_ms_p50: float
    ttft_ms_p95: float
    hit_percent: float
    num_requests: int
    num_refused: int
    num_failed: int
    load_max_over_mean: float


def play(policy: str, seed: int, arguments: str, traces: Path | None) -> Run:
    options = replay.parser().parse_args(
        [*shlex.split(arguments), "--policy", policy, "--seed", str(seed)]
    )
    options.traces = traces
    answers, admitted = asyncio.run(replay.run(options))
    span_s = max(a.sent_at for a in answers) or 1.0
    found = part("all", answers, Slo(options.ttft_slo_s, options.tpot_slo_s), span_s)
    loads = [n for name, n in admitted.items() if name.startswith("prefill")] or [0.0]
    return Run(
        policy,
        seed,
        arguments,
        found.goodput_per_s,
        found.within_slo_percent,
        found.ttft_ms[0],
        found.ttft_ms[2],
        found.hit_percent,
        found.num_requests,
        found.num_refused,
        found.num_failed,
        max(loads) / max(1e-9, sum(loads) / len(loads)),
    )


def known(path: Path | None) -> list[Run]:
    """What an earlier call has measured."""
    if path is None or not path.exists():
        return []
    return [Run(**json.loads(line)) for line in path.read_text().splitlines()]


_COLUMNS: Final[tuple[tuple[str, Callable[[Run], float], str], ...]] = (
    ("goodput/s", lambda r: r.goodput_per_s, ".2f"),
    ("within SLO %", lambda r: r.within_slo_percent, ".1f"),
    ("TTFT p50 ms", lambda r: r.ttft_ms_p50, ".0f"),
    ("p95", lambda r: r.ttft_ms_p95, ".0f"),
    ("hit %", lambda r: r.hit_percent, ".1f"),
    ("refused", lambda r: r.num_refused, ".0f"),
    ("failed", lambda r: r.num_failed, ".0f"),
    ("max/mean", lambda r: r.load_max_over_mean, ".2f"),
)


def table(runs: Sequence[Run]) -> str:
    """Markdown: median (lowest..highest) over the seeds."""
    by_policy = {
        policy: [r for r in runs if r.policy == policy]
        for policy in dict.fromkeys(r.policy for r in runs)
    }
    rows = [((policy, len(own)), own) for policy, own in by_policy.items()]
    return spread_table(("policy", "seeds"), _COLUMNS, rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--traces", type=Path, help="folder of the public traces")
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--replay", default=TRACE, help="what loadtests.replay is told")
    parser.add_argument("--max-runs", type=int, help="stop after so many, to go on another time")
    parser.add_argument(
        "--out", type=Path, help="keep runs in OUT.jsonl; write OUT.json and OUT.md"
    )
    options = parser.parse_args()
    kept = options.out.with_suffix(".jsonl") if options.out else None
    runs = [r for r in known(kept) if r.replay == options.replay]
    done = {(r.policy, r.seed) for r in runs}
    jobs = [
        (policy, seed)
        for seed in range(1, options.seeds + 1)
        for policy in options.policies.split(",")
        if (policy, seed) not in done
    ]
    for number, (policy, seed) in enumerate(jobs[: options.max_runs], start=1):
        print(f"[{number}/{len(jobs)}] {policy}, seed {seed}", file=sys.stderr, flush=True)
        runs.append(play(policy, seed, options.replay, options.traces))
        if kept:
            with kept.open("a") as lines:
                lines.write(json.dumps(asdict(runs[-1])) + "\n")
    text = table(runs)
    print(text)
    if options.out:
        write(
            options.out,
            "loadtests.mesh_compare",
            "Placement policies on a real mesh",
            f"Each run: `loadtests.replay {options.replay}`. Sim engines, real processes and KV transfer; clients, mesh and servers share"
            " the cores. Median (lowest..highest) over the seeds.",
            text,
            runs=[asdict(run) for run in runs],
        )


if __name__ == "__main__":
    main()
