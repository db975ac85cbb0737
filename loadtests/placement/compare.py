"""Placement policies side by side on a real mesh of sim instances: the same arrivals, >= 3 seeds,
one table with spread.

    make bench NAME=compare-mesh TRACES=FOLDER ARGS="--out FILE"    # about 25 minutes
    python -m loadtests.placement.compare --traces FOLDER \
        --cases "Mooncake, bursts" --policies default,kv_router --seeds 1
    python -m loadtests.placement.compare --out FILE --max-runs 0    # write the report again

Each run has its own mesh. For each seed, all policies run one after the other, so that all see the
same minutes of the machine. When a run is over, it becomes a line in OUT.jsonl. It is not repeated,
so an interrupted comparison continues where it stopped.

Each policy also has a twin: a simulation of the same arrivals, policy and shape on the virtual
clock, where nothing costs CPU. The real mesh is slower, because of its own work and other work on
the machine. If the mesh is slower by more than the policies differ, the table says nothing about
the policies.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import shlex
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from loadtests.harness.results import write
from loadtests.harness.verdicts import OURS
from loadtests.placement.compare_report import (
    EVEN_OFF,
    OFF,
    Run,
    page,
)
from loadtests.sim.mesh import MeshShape, VirtualMesh
from loadtests.traffic import replay
from loadtests.traffic.report import Slo, part
from pdmesh.core.placement.baselines import POLICIES
from pdmesh.core.placement.policies import Weights
from pdmesh.engine.sim.config import CHUNK_TOKENS
from pdmesh.engine.step_time_laws import LAWS
from pdmesh.launcher.mesh import MeshFailed

_MANY_BLOCKS: Final = 16_384  # blocks of a decode, whose cache is not measured

_MESH: Final = "--prefill 8 --decode 2 --ttft-slo-s 0.5 --tpot-slo-s 0.5"


@dataclass(frozen=True, slots=True)
class Case:
    """A load, and the policies that play it.

    `arguments` are those of loadtests.traffic.replay. With empty `policies`, all policies play the
    load. `least_reuse` is for RTP-LLM's workloads (S131): our reuse length must be at least this
    many times theirs. It is 0 for other workloads.
    """

    arguments: str
    policies: tuple[str, ...] = ()
    least_reuse: float = 0.0


# Eight prefills run at half to three quarters of their capacity, and the prompts do not fit into
# their caches. With less load, every policy would meet any SLO. With more load, none would. Here,
# Mooncake's prompts have 280 tokens on average, which take 120 ms by the law, and some CPU. Its
# answers have 2 to 20 tokens. So their time per token is mostly the hand-over and a step of 40 ms.
# The SLO on this time only catches answers that hang. The first two cases are RTP-LLM's workloads
# (S131). They are compared with RTP-LLM's scheduling switched off.
CASES: Final = {
    "short chats": Case(
        f"--workload short-chats --first 720 --rate 40 --prefill-blocks 52 {_MESH}",
        (OURS, OFF, EVEN_OFF),
        least_reuse=2.0,
    ),
    "long prompts": Case(
        f"--workload long-prompts --first 300 --rate 16 --lengths 0.25 --prefill-blocks 64 {_MESH}",
        (OURS, OFF, EVEN_OFF),
        least_reuse=1.0,
    ),
    "Mooncake, jittered": Case(
        "--workload mooncake --jitter --first 800 --time 0.05 --lengths 0.02 --prefill-blocks "
        f"256 {_MESH}"
    ),
    "Mooncake, bursts": Case(
        f"--workload mooncake --first 800 --time 0.06 --lengths 0.02 --prefill-blocks 256 {_MESH}"
    ),
}


def play(case: str, policy: str, seed: int, arguments: str, traces: Path | None) -> Run:
    options = replay.parser().parse_args(
        [*shlex.split(arguments), "--policy", policy, "--seed", str(seed)]
    )
    options.traces = traces
    twin = twin_of(options)
    played = asyncio.run(replay.run(options))
    span_s = max(a.sent_at for a in played.answers) or 1.0
    done = [a for a in played.answers if a.is_answered]
    found = part("all", played.answers, Slo(options.ttft_slo_s, options.tpot_slo_s), span_s)
    loads = [n for name, n in played.admitted.items() if name.startswith("prefill")] or [0.0]
    return Run(
        case,
        policy,
        seed,
        arguments,
        found.goodput_per_s,
        found.within_slo_percent,
        1e3 * sum(a.ttft_s for a in done) / max(1, len(done)),
        found.ttft_ms[0],
        found.ttft_ms[2],
        found.hit_percent,
        sum(a.num_cached_tokens for a in done) / max(1, len(done)),
        found.num_requests,
        found.num_refused,
        found.num_failed,
        max(loads) / max(1e-9, sum(loads) / len(loads)),
        played.cpu_s / span_s,
        1e3 * max(a.lag_s for a in played.answers),
        twin.ttft_ms_mean,
        twin.ttft_ms_p95,
        twin.within_slo_percent,
        twin.hit_percent,
    )


@dataclass(frozen=True, slots=True)
class Twin:
    """The results of the same run on the virtual clock."""

    ttft_ms_mean: float
    ttft_ms_p95: float
    within_slo_percent: float
    hit_percent: float


def twin_of(options: argparse.Namespace) -> Twin:
    """Simulate the run that `replay` would do with these options.

    In the simulation, Python and the network take no time.
    """
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
    ttft_ms = sorted(1e3 * s.ttft_s for s in done) or [0.0]
    return Twin(
        sum(ttft_ms) / len(ttft_ms),
        ttft_ms[int(0.95 * (len(ttft_ms) - 1))],
        100 * good / max(1, len(mesh.served)),
        100 * sum(s.num_cached_tokens for s in done) / max(1, num_tokens),
    )


def known(path: Path | None) -> list[Run]:
    """The runs that earlier calls have measured."""
    if path is None or not path.exists():
        return []
    return [Run(**json.loads(line)) for line in path.read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--traces", type=Path, help="folder of the public traces")
    parser.add_argument("--cases", default=";".join(CASES), help="separated by ;")
    parser.add_argument("--policies", help="separated by commas; default: all that a case asks for")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--replay", help="a case of your own: the arguments of loadtests.traffic.replay"
    )
    parser.add_argument(
        "--max-runs", type=int, help="stop after this many runs; the next call continues"
    )
    parser.add_argument(
        "--within-min", type=float, default=math.inf, help="begin no run after this many minutes"
    )
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
    began = time.monotonic()
    for number, (case, policy, seed) in enumerate(jobs[: options.max_runs], start=1):
        spent_min = (time.monotonic() - began) / 60
        if spent_min > options.within_min:
            break
        _say(f"[{number}/{len(jobs)}, {spent_min:.1f} min] {case}, {policy}, seed {seed}")
        try:
            runs.append(play(case, policy, seed, cases[case].arguments, options.traces))
        except MeshFailed as exc:  # the next call plays this run again
            _say(f"this run is left out: {exc}")
            continue
        if kept:
            with kept.open("a") as lines:
                lines.write(json.dumps(asdict(runs[-1])) + "\n")
    text = page(runs, {name: case.least_reuse for name, case in cases.items() if case.least_reuse})
    print(text)
    if options.out:
        write(
            options.out,
            "loadtests.placement.compare",
            "Placement policies on a real mesh",
            "Sim engines, real processes and KV transfer; clients, mesh and servers share the "
            "cores. Median (lowest..highest) over the seeds. A seed spreads the trace's 3 s ticks "
            "if the trace is jittered; otherwise it only breaks the policy's ties. Twin: the same "
            "on the virtual clock, where nothing costs CPU.",
            text,
            runs=[asdict(run) for run in runs],
        )


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


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
