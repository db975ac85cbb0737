"""Batches in order of arrival, or of prompts of similar length: how much padding is computed, and
which requests wait for it (S90, S91).

    python -m loadtests.sim.windows --traces FOLDER --out loadtests/results/windows-2026-11-21

The runs are on the virtual clock, at rates from an occasional queue to overload. Prompts have the
lengths of the Mooncake trace, divided by fifty, and share nothing. Prefills take four prompts at
once. They pad the prompts to the longest, or compute each prompt without padding.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from loadtests.harness.results import quantile, spread_table, write
from loadtests.sim.mesh import MeshShape, VirtualMesh
from loadtests.traffic.workloads import (
    Arrival,
    mooncake,
    poisson,
    scaled,
    trace_file,
)
from pdmesh.core.placement.policies import Weights
from pdmesh.engine.step_time_laws import PADDED_CPU, SMOLLM2_CPU

TRACE: Final = "mooncake_conversation_trace.jsonl"
DP_SIZE: Final = 4
_LENGTHS: Final = 0.02
_SHAPE: Final = MeshShape(
    PADDED_CPU, num_prefill=4, num_decode=4, prefill_slots=DP_SIZE, ttft_slo_s=60.0
)
SHAPES: Final = {
    "as slots come free": _SHAPE,
    "batches in order": replace(_SHAPE, prefill_batch=DP_SIZE, max_passed=0),
    "similar lengths": replace(_SHAPE, prefill_batch=DP_SIZE),
}
_RATES: Final = {PADDED_CPU: (22.0, 26.0, 32.0), SMOLLM2_CPU: (26.0, 32.0)}


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one run.

    `waste_percent` is the tokens that padding adds, relative to the requested tokens. They cost
    time only with a law that pads.
    """

    law: str
    rate_per_s: float
    batches: str
    seed: int
    waste_percent: float
    ttft_ms_mean: float
    ttft_ms_p50: float
    ttft_ms_p95: float
    ttft_ms_p99: float
    ttft_ms_max: float
    took_s: float  # until all requests were answered


def arrivals(traces: Path | None, count: int, rate_per_s: float, seed: int) -> list[Arrival]:
    rng = random.Random(seed)
    sample = rng.sample(mooncake(trace_file(traces, TRACE)), count)
    alone = [replace(a, blocks=(), num_output_tokens=2) for a in scaled(sample, lengths=_LENGTHS)]
    return poisson(alone, rate_per_s, rng)


def play(
    shape: MeshShape, batches: str, seed: int, load: Sequence[Arrival], rate: float
) -> Outcome:
    mesh = VirtualMesh(shape, "default", seed, Weights())
    mesh.run(load)
    done = [s for s in mesh.served if not s.is_refused]
    ttft = sorted(1e3 * s.ttft_s for s in done)
    prefills = [w for w in mesh.workers.values() if w.instance_id.startswith("prefill")]
    padded = sum(w.num_padded_tokens for w in prefills)
    return Outcome(
        shape.law.name,
        rate,
        batches,
        seed,
        100 * padded / sum(w.num_chunk_tokens for w in prefills),
        sum(ttft) / len(ttft),
        quantile(ttft, 0.5),
        quantile(ttft, 0.95),
        quantile(ttft, 0.99),
        ttft[-1],
        max(s.arrival.at_s + s.e2e_s for s in done),
    )


_COLUMNS: Final[tuple[tuple[str, Callable[[Outcome], float], str], ...]] = (
    ("padding %", lambda o: o.waste_percent, ".0f"),
    ("TTFT mean ms", lambda o: o.ttft_ms_mean, ".0f"),
    ("p50", lambda o: o.ttft_ms_p50, ".0f"),
    ("p95", lambda o: o.ttft_ms_p95, ".0f"),
    ("p99", lambda o: o.ttft_ms_p99, ".0f"),
    ("longest", lambda o: o.ttft_ms_max, ".0f"),
    ("all took s", lambda o: o.took_s, ".1f"),
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--traces", type=Path, help="folder of the public traces")
    parser.add_argument("--first", type=int, default=800, help="requests")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="write OUT.json and OUT.md")
    options = parser.parse_args()
    rows: list[tuple[tuple[object, ...], list[Outcome]]] = []
    for law, rates in _RATES.items():
        for rate in rates:
            for batches, shape in SHAPES.items():
                runs = [
                    play(
                        replace(shape, law=law),
                        batches,
                        seed,
                        arrivals(options.traces, options.first, rate, seed),
                        rate,
                    )
                    for seed in range(1, options.seeds + 1)
                ]
                rows.append(((law.name, f"{rate:.0f}", batches), runs))
    text = spread_table(("law", "requests/s", "batches"), _COLUMNS, rows)
    print(text)
    if options.out:
        write(
            options.out,
            "loadtests.sim.windows",
            "Prompts of similar length in one batch",
            f"Simulated: {options.first} prompts with the lengths of the Mooncake trace at "
            f"{_LENGTHS}, nothing shared, Poisson; 4 prefills of"
            f" {DP_SIZE} prompts at once. Median (lowest..highest) over the seeds.",
            text,
            clock="virtual: what the network and Python cost is not in these numbers",
            outcomes=[asdict(run) for _, runs in rows for run in runs],
        )


if __name__ == "__main__":
    main()
