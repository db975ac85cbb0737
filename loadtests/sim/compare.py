"""Policies compared on the virtual clock: the same arrivals, the same seeds, one table with spread
(`make bench NAME=compare`).

    # The full Mooncake trace, and the cases that need none.
    python -m loadtests.sim.compare --traces FOLDER
    # One case under two policies.
    python -m loadtests.sim.compare --cases "cache pressure" --policies default,kv_router
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Final

from loadtests.harness.progress import Progress
from loadtests.harness.results import Spread, quantile, write
from loadtests.harness.verdicts import OURS, Measure, verdicts
from loadtests.sim.mesh import MeshShape, VirtualMesh
from loadtests.traffic.workloads import (
    Arrival,
    long_prompts,
    mooncake,
    prefixed_scenarios,
    short_chats,
)
from pdmesh.core.placement.baselines import POLICIES
from pdmesh.core.placement.policies import Weights
from pdmesh.engine.step_time_laws import MOCKER, SMOLLM2_CPU

TRACE: Final = "mooncake_conversation_trace.jsonl"
# Reuse with Dynamo's KV router in percent, from Dynamo's own replay of the same trace with the same
# workers and blocks.
PEER_REUSE: Final = {
    "4 x 16384": 13.1,
    "8 x 16384": 20.2,
    "8 x 4096": 7.2,
    "P/D 4+4 x 16384": 16.3,
    "cache pressure": 91.0,
}


@dataclass(frozen=True, slots=True)
class Case:
    """A mesh and its load.

    `arrivals(traces, seed)` makes the load. It needs the folder of trace files if `is_trace`.
    """

    name: str
    shape: MeshShape
    arrivals: Callable[[Path, int], list[Arrival]]
    is_trace: bool = False


def _as_is(traces: Path, seed: int) -> list[Arrival]:
    return mooncake(traces / TRACE)


def _jittered(traces: Path, seed: int) -> list[Arrival]:
    return mooncake(traces / TRACE, jitter_seed=seed)


def _pressure(traces: Path, seed: int) -> list[Arrival]:
    return prefixed_scenarios(
        random.Random(seed),
        num_scenarios=6,
        num_requests=200,
        prefix_tokens=896,
        num_tokens=968,
        num_output_tokens=8,
        rate_per_s=4.0,
        block_size=16,
    )


def _short_chats(traces: Path, seed: int) -> list[Arrival]:
    return short_chats(random.Random(seed), num_scenarios=200, num_requests=30, rate_per_s=19.0)


def _long_prompts(traces: Path, seed: int) -> list[Arrival]:
    return long_prompts(random.Random(seed), num_scenarios=40, num_requests=50, rate_per_s=1.9)


_SHORT_CHATS: Final = MeshShape(
    SMOLLM2_CPU, num_prefill=4, num_decode=4, num_blocks=256, prefill_slots=2
)

CASES: Final = (
    Case("4 x 16384", MeshShape(MOCKER, num_fusion=4), _as_is, is_trace=True),
    Case("8 x 16384", MeshShape(MOCKER, num_fusion=8), _as_is, is_trace=True),
    Case("8 x 16384, jittered", MeshShape(MOCKER, num_fusion=8), _jittered, is_trace=True),
    Case("8 x 4096", MeshShape(MOCKER, num_fusion=8, num_blocks=4096), _as_is, is_trace=True),
    Case(
        "P/D 4+4 x 16384",
        MeshShape(MOCKER, num_prefill=4, num_decode=4, prefill_slots=16),
        _as_is,
        is_trace=True,
    ),
    Case(
        "cache pressure",
        MeshShape(MOCKER, num_fusion=4, num_blocks=160, block_size=16, decode_slots=64),
        _pressure,
    ),
    Case("short chats", _SHORT_CHATS, _short_chats),
    Case(
        "short chats, host pools",
        replace(_SHORT_CHATS, host_blocks=1024),
        _short_chats,
    ),
    Case(
        "short chats, host pools untold",
        replace(_SHORT_CHATS, host_blocks=1024, tells_peers=False),
        _short_chats,
    ),
    Case(
        "long prompts",
        MeshShape(SMOLLM2_CPU, num_prefill=4, num_decode=4, num_blocks=512, prefill_slots=2),
        _long_prompts,
    ),
)
BY_NAME: Final = {case.name: case for case in CASES}


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one case under one policy and seed.

    `reuse_percent` is the share of prompt blocks that the computing instance found in its cache.
    """

    case: str
    policy: str
    seed: int
    reuse_percent: float
    reused_tokens: float  # per request
    ttft_ms_mean: float
    ttft_ms_p50: float
    ttft_ms_p95: float
    ttft_ms_p99: float
    tpot_ms_mean: float
    e2e_s_mean: float
    num_requests: int
    num_refused: int
    num_rejections: int
    prediction_error_percent: float  # MAPE of predicted prefill times, without the first 20
    # max of computed prompt tokens over their mean, among prefilling instances
    load_max_over_mean: float
    num_idle: int
    run_s: float


def play(case: Case, policy: str, seed: int, traces: Path) -> Outcome:
    began = time.perf_counter()
    arrivals = case.arrivals(traces, seed)
    mesh = VirtualMesh(case.shape, policy, seed, Weights())
    mesh.run(arrivals)
    done = [s for s in mesh.served if not s.is_refused]
    ttft = sorted(1e3 * s.ttft_s for s in done)
    block_size = case.shape.block_size
    named = sum(len(s.arrival.blocks) for s in done)
    cached = sum(s.num_cached_tokens // block_size for s in done)
    errors = mesh.errors[20:] or mesh.errors
    prefilled = [w for w in mesh.workers.values() if not w.instance_id.startswith("decode")]
    loads = [w.num_prompt_tokens - w.num_cached_tokens for w in prefilled]
    return Outcome(
        case.name,
        policy,
        seed,
        100 * cached / max(1, named),
        sum(s.num_cached_tokens for s in done) / len(done),
        sum(ttft) / len(ttft),
        quantile(ttft, 0.5),
        quantile(ttft, 0.95),
        quantile(ttft, 0.99),
        1e3 * sum(s.tpot_s for s in done) / len(done),
        sum(s.e2e_s for s in done) / len(done),
        len(mesh.served),
        len(mesh.served) - len(done),
        sum(s.num_rejections for s in mesh.served),
        100 * sum(errors) / max(1, len(errors)),
        max(loads) / (sum(loads) / len(loads)),
        sum(not w.num_prompts for w in prefilled),
        time.perf_counter() - began,
    )


def table(outcomes: Sequence[Outcome]) -> str:
    """A Markdown table of medians (lowest..highest) over the seeds."""
    lines = []
    for case in dict.fromkeys(o.case for o in outcomes):
        peer = PEER_REUSE.get(case)
        note = f" (Dynamo's KV router: {peer} %)" if peer else ""
        lines += [f"\n### {case}{note}\n", _HEAD, _RULE]
        by_policy = {
            policy: [o for o in outcomes if (o.case, o.policy) == (case, policy)]
            for policy in dict.fromkeys(o.policy for o in outcomes if o.case == case)
        }
        for policy, runs in by_policy.items():
            cells = [
                Spread.of([getattr(o, field) for o in runs]).text(form) for field, form in _COLUMNS
            ]
            lines.append(f"| {policy} | {' | '.join(cells)} |")
        if judged := verdicts(by_policy, _JUDGED, partial(_price, by_policy)):
            lines += ["", judged]
    return "\n".join(lines)


def _price(
    by_policy: Mapping[str, Sequence[Outcome]], measure: Measure[Outcome], rival: str
) -> str:
    """A sentence on a policy that is better than ours by `measure`.

    It says whether this rival is worse or better by the other of the two main measures.
    """
    reuse, mean, *_ = _JUDGED
    other = mean if measure is reuse else reuse
    ours, theirs = (other.of(by_policy[policy]).median for policy in (OURS, rival))
    how = "pays with" if other.is_better(ours, theirs) else "has, too,"
    return (
        f" It {how} {other.name} {format(theirs, other.form)} where ours has "
        f"{format(ours, other.form)}."
    )


_JUDGED: Final[tuple[Measure[Outcome], ...]] = (
    Measure("reuse, %", lambda o: o.reuse_percent, ".1f", is_more_better=True),
    Measure("TTFT mean, ms", lambda o: o.ttft_ms_mean, ".0f"),
    Measure("TTFT p95, ms", lambda o: o.ttft_ms_p95, ".0f"),
    Measure("TTFT p99, ms", lambda o: o.ttft_ms_p99, ".0f"),
)
_COLUMNS: Final = (
    ("reuse_percent", ".1f"),
    ("reused_tokens", ".0f"),
    ("ttft_ms_mean", ".0f"),
    ("ttft_ms_p50", ".0f"),
    ("ttft_ms_p95", ".0f"),
    ("ttft_ms_p99", ".0f"),
    ("e2e_s_mean", ".2f"),
    ("num_rejections", ".0f"),
    ("prediction_error_percent", ".1f"),
    ("load_max_over_mean", ".2f"),
    ("num_idle", ".0f"),
)
_HEAD: Final = (
    "| policy | reuse % | tokens | TTFT mean ms | p50 | p95 | p99 | E2E s | rejections | error % "
    "| max/mean | idle |"
)
_RULE: Final = "|---|" + "---|" * len(_COLUMNS)


def _num_seeds(case: Case, policy: str, options: argparse.Namespace) -> int:
    is_short = case.is_trace and policy not in ("default", "kv_router")
    num_seeds: int = options.seeds
    return int(options.trace_seeds or num_seeds) if is_short else num_seeds


def _play(job: tuple[str, str, int, str]) -> Outcome:
    case, policy, seed, traces = job
    return play(BY_NAME[case], policy, seed, Path(traces))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--traces", type=Path, help="folder of the public traces")
    parser.add_argument("--cases", default="", help="separated by ; default: all that can run")
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--trace-seeds",
        type=int,
        help="seeds of policies other than default and kv_router, on a trace; default: all",
    )
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, help="write OUT.json, OUT.md and OUT.png")
    options = parser.parse_args()
    has_traces = options.traces is not None and (options.traces / TRACE).exists()
    names = options.cases.split(";") if options.cases else list(BY_NAME)
    cases = [
        BY_NAME[name.strip()] for name in names if has_traces or not BY_NAME[name.strip()].is_trace
    ]
    if not has_traces:
        print(
            "only cases that play no trace: --traces FOLDER (make: TRACES=FOLDER) says where "
            f"{TRACE} is",
            file=sys.stderr,
        )
    jobs = [
        (case.name, policy, seed, str(options.traces or ""))
        for case in cases
        for policy in options.policies.split(",")
        for seed in range(1, _num_seeds(case, policy, options) + 1)
    ]
    progress = Progress(len(jobs))
    outcomes = []
    with ProcessPoolExecutor(options.processes) as pool:
        for outcome in pool.map(_play, jobs):
            progress.step(f"{outcome.case}, {outcome.policy}, seed {outcome.seed}")
            outcomes.append(outcome)
    progress.close()
    text = table(outcomes)
    print(text)
    if options.out:
        _write(options.out, outcomes, text)


def _write(out: Path, outcomes: Sequence[Outcome], text: str) -> None:
    from loadtests.sim.plots import draw  # matplotlib takes a second to import

    at = datetime.now(UTC).isoformat(timespec="seconds")
    write(
        out,
        "loadtests.sim.compare",
        f"Placement policies on a virtual clock, {at}",
        "Simulated: the mesh's own cores (placement, index, admission, request, waiting room) and "
        "laws; median (lowest..highest) over"
        " the seeds. The Mooncake arrivals are as they are, in bursts at 3 s ticks, unless "
        "jittered within the tick; seeds then move"
        f" only the policy's own ties.\n\nWeights: {asdict(Weights())}",
        text,
        at=at,
        weights=asdict(Weights()),
        clock="virtual: what the network and Python cost is not in these numbers",
        outcomes=[asdict(outcome) for outcome in outcomes],
    )
    draw(outcomes, out.with_suffix(".png"))


if __name__ == "__main__":
    main()
