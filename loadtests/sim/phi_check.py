"""Throughput per instance, Phi (S2), as formula (1) predicts it from a profile, compared with what
the mesh carries on the virtual clock.

    python -m loadtests.sim.phi_check --out loadtests/results/phi-2026-11-21

Each workload arrives at 1.5 times the predicted rate, so that the mesh is full. The measured rate
counts the requests that are completed in the last two thirds of the arrivals' time. The profile is
computed in advance from the engine's law, and from the share of prompt tokens that the run found in
caches (r_pre). The table also has the error (MAPE) of the prefill times that the master predicted,
without the first 20.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from loadtests.harness.results import spread_table, write
from loadtests.sim.mesh import MeshShape, Served, VirtualMesh
from loadtests.sim.profile import profile
from loadtests.traffic.workloads import Arrival, poisson, prefixed_scenarios
from pdmesh.core.placement.policies import Weights
from pdmesh.core.ratio.throughput import Split
from pdmesh.engine.step_time_laws import MOCKER, SMOLLM2_CPU


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests of one kind. They belong to several scenarios, each with a prefix of
    `prefix_tokens`.
    """

    name: str
    shape: MeshShape
    num_tokens: int
    num_output: int
    prefix_tokens: int
    num_scenarios: int
    num_requests: int


WORKLOADS: Final = (
    Workload(
        "short chats, prefill binds",
        MeshShape(SMOLLM2_CPU, num_prefill=4, num_decode=4, num_blocks=2048, prefill_slots=2),
        num_tokens=340,
        num_output=7,
        prefix_tokens=192,
        num_scenarios=40,
        num_requests=2000,
    ),
    Workload(
        "long answers, decode binds",
        MeshShape(
            SMOLLM2_CPU, num_prefill=4, num_decode=2, num_blocks=2048, prefill_slots=2,
            decode_slots=16
        ),
        num_tokens=320,
        num_output=200,
        prefix_tokens=64,
        num_scenarios=40,
        num_requests=800,
    ),
    Workload(
        "long prompts, a large model",
        MeshShape(MOCKER, num_prefill=6, num_decode=2, num_blocks=65_536, prefill_slots=4),
        num_tokens=2500,
        num_output=114,
        prefix_tokens=832,
        num_scenarios=40,
        num_requests=6000,
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Checked:
    """The check of one workload. Rates are in requests/s per instance."""

    workload: str
    seed: int
    bottleneck: str
    predicted: float
    measured: float
    error_percent: float
    cached_share: float
    prediction_error_percent: float  # of predicted prefill times


def check(workload: Workload, seed: int, rate_per_s: float = 0.0) -> Checked:
    """Check one workload. If `rate_per_s` is 0, a first run finds the rate.

    The first run is needed because the rate and the cached share depend on each other.
    """
    shape = workload.shape
    arrivals = _arrivals(workload, seed, rate_per_s or 1.0)
    mesh = VirtualMesh(shape, "default", seed, Weights())
    mesh.run(arrivals)
    full, seconds = _while_full(mesh.served)
    cached = sum(s.num_cached_tokens for s in full) / len(full)
    profiled = profile(
        shape.law,
        num_prompt=workload.num_tokens,
        num_output=workload.num_output,
        prefill_slots=shape.prefill_slots,
        decode_slots=shape.decode_slots,
        num_cached=round(cached),
        transfer_s=shape.transfer_token_s * workload.num_tokens,
    )
    phi = profiled.phi(Split(shape.num_prefill, shape.num_decode))
    if not rate_per_s:
        return check(workload, seed, 1.5 * phi.value * phi.num_instances)
    measured = len(full) / seconds / phi.num_instances
    errors = mesh.errors[20:]
    return Checked(
        workload.name,
        seed,
        phi.bottleneck,
        phi.value,
        measured,
        100 * (phi.value - measured) / measured,
        cached / workload.num_tokens,
        100 * sum(errors) / len(errors),
    )


def _arrivals(workload: Workload, seed: int, rate_per_s: float) -> list[Arrival]:
    arrivals = prefixed_scenarios(
        random.Random(seed),
        num_scenarios=workload.num_scenarios,
        num_requests=workload.num_requests // workload.num_scenarios,
        prefix_tokens=workload.prefix_tokens,
        num_tokens=workload.num_tokens,
        num_output_tokens=workload.num_output,
        rate_per_s=1.0,
    )
    return poisson(arrivals, rate_per_s, random.Random(seed))


def _while_full(served: Sequence[Served]) -> tuple[list[Served], float]:
    """Requests completed in the last two thirds of the arrivals' time, and the length of this time.

    In this time, the mesh is full and its caches are warm.
    """
    until = served[-1].arrival.at_s
    since = until / 3
    return [s for s in served if since <= s.arrival.at_s + s.e2e_s <= until], until - since


_COLUMNS: Final[tuple[tuple[str, Callable[[Checked], float], str], ...]] = (
    ("predicted", lambda c: c.predicted, ".3f"),
    ("measured", lambda c: c.measured, ".3f"),
    ("error %", lambda c: c.error_percent, ".1f"),
    ("found cached %", lambda c: 100 * c.cached_share, ".0f"),
    ("MAPE of prefill times %", lambda c: c.prediction_error_percent, ".2f"),
)


def table(checks: Sequence[Checked]) -> str:
    """A Markdown table of medians (lowest..highest) over the seeds."""
    by_workload = {
        workload: [c for c in checks if c.workload == workload]
        for workload in dict.fromkeys(c.workload for c in checks)
    }
    rows = [((workload, own[0].bottleneck), own) for workload, own in by_workload.items()]
    return spread_table(("workload", "binds"), _COLUMNS, rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="write OUT.json and OUT.md")
    options = parser.parse_args()
    checks = [check(w, seed) for w in WORKLOADS for seed in range(1, options.seeds + 1)]
    text = table(checks)
    print(text)
    if options.out:
        write(
            options.out,
            "loadtests.sim.phi_check",
            "Phi, predicted and measured",
            "Simulated: the mesh's own cores and the laws `smollm2-cpu` and `mocker`. Requests/s "
            "per instance; median (lowest..highest)"
            " over the seeds. The bar is 15 % (S2).",
            text,
            clock="virtual",
            checks=[asdict(c) for c in checks],
        )


if __name__ == "__main__":
    main()
