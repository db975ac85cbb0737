"""Placement policies side by side on a real mesh of sim instances: the same arrivals, >= 3 seeds, one table with spread.

    make compare-mesh TRACES=FOLDER ARGS="--out loadtests/results/mesh-compare-2026-11-21"      # about 25 minutes
    python -m loadtests.mesh_compare --traces FOLDER --cases "Mooncake, bursts" --policies default,kv_router --seeds 1

One run after the other, each on a mesh of its own, seed by seed, so that all policies meet the same minutes of the machine. Each run is a
line in OUT.jsonl as soon as it is over, and is not repeated: an interrupted comparison goes on where it was.

Beside each policy stands its twin: the same arrivals, policy and shape on the virtual clock, where nothing costs CPU. What the mesh is
slower by is its own work and whatever else the machine did; where that is more than policies differ by, the table says nothing of them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from loadtests import replay
from loadtests.results import spread_table, write
from loadtests.sim.mesh import MeshShape, VirtualMesh
from loadtests.traffic_report import Slo, part
from pdmesh.core.placement_baselines import POLICIES
from pdmesh.core.placement_policies import Weights
from pdmesh.engine.laws import LAWS
from pdmesh.engine.sim.config import CHUNK_TOKENS

_MANY_BLOCKS: Final = 16_384  # of a decode, which is not what is measured

_MESH: Final = "--prefill 8 --decode 2 --ttft-slo-s 0.5 --tpot-slo-s 0.5"


@dataclass(frozen=True, slots=True)
class Case:
    """`arguments` is what loadtests.replay is told; it is played by these policies alone, if it names any."""

    arguments: str
    policies: tuple[str, ...] = ()


# Eight prefills at half to three quarters of what they can compute, with caches that the prompts overflow: with less load every
# policy is within any SLO, with more none is. Mooncake's prompts are 280 tokens here on average: 120 ms by the law, and some of
# CPU. Its answers have 2 to 20 tokens, so their time per token is mostly the hand-over and a step of 40 ms: its bound is there to
# notice what hangs. The other two are RTP-LLM's workloads (S131), with its scheduling off in the mixed pool.
CASES: Final = {
    "Mooncake, jittered": Case(
        f"--workload mooncake --jitter --first 1000 --time 0.05 --lengths 0.02 --prefill-blocks 256 {_MESH}"
    ),
    "Mooncake, bursts": Case(
        f"--workload mooncake --first 1000 --time 0.06 --lengths 0.02 --prefill-blocks 256 {_MESH}"
    ),
    "short chats": Case(
        f"--workload short-chats --first 720 --rate 40 --prefill-blocks 52 {_MESH}",
        ("default", "mixed_pool"),
    ),
    "long prompts": Case(
        f"--workload long-prompts --first 300 --rate 16 --lengths 0.25 --prefill-blocks 64 {_MESH}",
        ("default", "mixed_pool"),
    ),
}


@dataclass(frozen=True, slots=True)
class Run:
    """One policy under one seed. `load_max_over_mean`: prompts admitted, over the prefills; `mesh_cores`: CPU of all its processes."""

    case: str
    policy: str
    seed: int
    replay: str
    goodput_per_s: float
    within_slo_percent: float
    ttft_ms_mean: float
    ttft_ms_p50: float
    ttft_ms_p95: float
    hit_percent: float
    num_requests: int
    num_refused: int
    num_failed: int
    load_max_over_mean: float
    mesh_cores: float
    generator_late_ms_max: float
    twin_ttft_ms_mean: float
    twin_within_slo_percent: float
    twin_hit_percent: float


@dataclass(frozen=True, slots=True)
class Twin:
    """The same run on the virtual clock."""

    ttft_ms_mean: float
    within_slo_percent: float
    hit_percent: float


def play(case: str, policy: str, seed: int, arguments: str, traces: Path | None) -> Run:
    options = replay.parser().parse_args(
        [*shlex.split(arguments), "--policy", policy, "--seed", str(seed)]
    )
    options.traces = traces
    twin = twin_of(options)
    played = asyncio.run(replay.run(options))
    span_s = max(a.sent_at for a in played.answers) or 1.0
    found = part("all", played.answers, Slo(options.ttft_slo_s, options.tpot_slo_s), span_s)
    loads = [n for name, n in played.admitted.items() if name.startswith("prefill")] or [0.0]
    ttft = [1e3 * a.ttft_s for a in played.answers if a.is_answered] or [0.0]
    return Run(
        case,
        policy,
        seed,
        arguments,
        found.goodput_per_s,
        found.within_slo_percent,
        sum(ttft) / len(ttft),
        found.ttft_ms[0],
        found.ttft_ms[2],
        found.hit_percent,
        found.num_requests,
        found.num_refused,
        found.num_failed,
        max(loads) / max(1e-9, sum(loads) / len(loads)),
        played.cpu_s / span_s,
        1e3 * max(a.lag_s for a in played.answers),
        twin.ttft_ms_mean,
        twin.within_slo_percent,
        twin.hit_percent,
    )


def twin_of(options: argparse.Namespace) -> Twin:
    """What `replay` would see with these options if neither Python nor the network took time."""
    shape = MeshShape(
        LAWS[options.law],
        num_prefill=options.prefill,
        num_decode=options.decode,
        prefill_slots=options.slots,
        decode_slots=replay.DECODE_SLOTS,
        chunk_tokens=CHUNK_TOKENS,
        ttft_slo_s=replay.TTFT_S,
    )
    if options.prefill_blocks:
        shape = replace(shape, num_blocks=options.prefill_blocks, decode_blocks=_MANY_BLOCKS)
    mesh = VirtualMesh(shape, options.policy, options.seed, Weights())
    mesh.run(replay.WORKLOADS[options.workload](options))
    done = [s for s in mesh.served if not s.is_refused]
    good = sum(s.ttft_s <= options.ttft_slo_s and s.tpot_s <= options.tpot_slo_s for s in done)
    num_tokens = sum(s.arrival.num_prompt_tokens for s in done)
    return Twin(
        1e3 * sum(s.ttft_s for s in done) / max(1, len(done)),
        100 * good / max(1, len(mesh.served)),
        100 * sum(s.num_cached_tokens for s in done) / max(1, num_tokens),
    )


def known(path: Path | None) -> list[Run]:
    """What an earlier call has measured."""
    if path is None or not path.exists():
        return []
    return [Run(**json.loads(line)) for line in path.read_text().splitlines()]


_COLUMNS: Final[tuple[tuple[str, Callable[[Run], float], str], ...]] = (
    ("goodput/s", lambda r: r.goodput_per_s, ".2f"),
    ("within SLO %", lambda r: r.within_slo_percent, ".1f"),
    ("TTFT mean ms", lambda r: r.ttft_ms_mean, ".0f"),
    ("p50", lambda r: r.ttft_ms_p50, ".0f"),
    ("p95", lambda r: r.ttft_ms_p95, ".0f"),
    ("hit %", lambda r: r.hit_percent, ".1f"),
    ("refused", lambda r: r.num_refused, ".0f"),
    ("failed", lambda r: r.num_failed, ".0f"),
    ("max/mean", lambda r: r.load_max_over_mean, ".2f"),
    ("mesh cores", lambda r: r.mesh_cores, ".2f"),
    ("twin TTFT ms", lambda r: r.twin_ttft_ms_mean, ".0f"),
    ("twin SLO %", lambda r: r.twin_within_slo_percent, ".1f"),
    ("twin hit %", lambda r: r.twin_hit_percent, ".1f"),
)


def table(runs: Sequence[Run]) -> str:
    """Markdown: median (lowest..highest) over the seeds, case by case."""
    parts = []
    for case in dict.fromkeys(r.case for r in runs):
        by_policy: dict[str, list[Run]] = {}
        for run in runs:
            if run.case == case:
                by_policy.setdefault(run.policy, []).append(run)
        rows = [((policy, len(own)), own) for policy, own in by_policy.items()]
        heading = (
            f"### {case}\n\n`loadtests.replay {next(r.replay for r in runs if r.case == case)}`"
        )
        parts.append(f"{heading}\n\n{spread_table(('policy', 'seeds'), _COLUMNS, rows)}")
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--traces", type=Path, help="folder of the public traces")
    parser.add_argument("--cases", default=";".join(CASES), help="separated by ;")
    parser.add_argument("--policies", help="separated by commas; default: all that a case asks for")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--replay", help="a case of your own: what loadtests.replay is told")
    parser.add_argument("--max-runs", type=int, help="stop after so many, to go on another time")
    parser.add_argument(
        "--out", type=Path, help="keep runs in OUT.jsonl; write OUT.json and OUT.md"
    )
    options = parser.parse_args()
    cases = {"own": Case(options.replay)} if options.replay else _named(options.cases)
    kept = options.out.with_suffix(".jsonl") if options.out else None
    runs = [r for r in known(kept) if r.case in cases and cases[r.case].arguments == r.replay]
    done = {(r.case, r.policy, r.seed) for r in runs}
    jobs = [
        (case, policy, seed)
        for seed in range(1, options.seeds + 1)
        for case in cases
        for policy in _policies(cases[case], options.policies)
        if (case, policy, seed) not in done
    ]
    for number, (case, policy, seed) in enumerate(jobs[: options.max_runs], start=1):
        print(f"[{number}/{len(jobs)}] {case}, {policy}, seed {seed}", file=sys.stderr, flush=True)
        runs.append(play(case, policy, seed, cases[case].arguments, options.traces))
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
            "Sim engines, real processes and KV transfer; clients, mesh and servers share the cores. Median (lowest..highest) over the seeds,"
            " which spread the trace's 3 s ticks anew where it is jittered, and else move ties alone. Twin: the same on the virtual clock,"
            " where nothing costs CPU.",
            text,
            runs=[asdict(run) for run in runs],
        )


def _named(names: str) -> dict[str, Case]:
    wanted = [name.strip() for name in names.split(";")]
    unknown = [name for name in wanted if name not in CASES]
    if unknown:
        raise SystemExit(f"no case is called {unknown[0]!r}; there are {'; '.join(CASES)}")
    return {name: CASES[name] for name in wanted}


def _policies(case: Case, wanted: str | None) -> list[str]:
    played = case.policies or tuple(POLICIES)
    return [p for p in played if wanted is None or p in wanted.split(",")]


if __name__ == "__main__":
    main()
