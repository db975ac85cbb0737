"""What session hints gain: agents whose clients say when they pause and when they are done, beside
the same requests without hints.

    make bench NAME=session-hints
    python -m loadtests.placement.session_hints --seeds 5 --out loadtests/results/FILE

The simulated mesh has four instances. Their engines hold 96 blocks each, and their host pools 256
blocks, with the product's eviction. Sixty agents run tools for 4 to 20 s, and one time in five for
a minute or two. At the same time, prompts that never come again fill the pools.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from loadtests.harness.results import Spread, quantile, write
from loadtests.placement import families
from loadtests.sim.mesh import MeshShape, VirtualMesh
from loadtests.traffic.workloads import Arrival
from pdmesh.core.kv.tiers.session_holds import SessionState
from pdmesh.core.placement.policies import Weights
from pdmesh.engine.step_time_laws import MOCKER

_SHAPE: Final = MeshShape(
    MOCKER, num_fusion=4, num_blocks=96, host_blocks=256, block_size=families.BLOCK
)
_NUM_SESSIONS: Final = 60
_HINTS: Final[dict[str, frozenset[SessionState]]] = {
    "none": frozenset(),
    "pauses": frozenset({SessionState.PAUSED_FOR_TOOL}),
    "done": frozenset({SessionState.DONE}),
    "pauses and done": frozenset(SessionState),
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """The results of one run. `others_ms_mean` is the TTFT of prompts that belong to no agent."""

    hints: str
    seed: int
    reuse_percent: float
    ttft_ms_mean: float
    ttft_ms_p95: float
    ttft_ms_p99: float
    others_ms_mean: float


def play(hints: str, seed: int) -> Outcome:
    mesh = VirtualMesh(_SHAPE, "default", seed, Weights())
    mesh.run([
        _said(a, _HINTS[hints]) for a in families.agents_beside_documents(seed, _NUM_SESSIONS)
    ])  # fmt: skip
    done = [s for s in mesh.served if not s.is_refused]
    agents = [s for s in done if s.arrival.chat_id]
    ttft = sorted(1e3 * s.ttft_s for s in agents)
    num_tokens = sum(s.arrival.num_prompt_tokens for s in agents)
    return Outcome(
        hints,
        seed,
        100 * sum(s.num_cached_tokens for s in agents) / num_tokens,
        statistics.fmean(ttft),
        quantile(ttft, 0.95),
        quantile(ttft, 0.99),
        statistics.fmean(1e3 * s.ttft_s for s in done if not s.arrival.chat_id),
    )


def _said(arrival: Arrival, states: frozenset[SessionState]) -> Arrival:
    """The arrival. Its session state is removed unless it is in `states`."""
    return arrival if arrival.session_state in states else replace(arrival, session_state=None)


def table(outcomes: list[Outcome]) -> str:
    """A table of medians over the seeds. Each kind of hints is also divided by no hints, seed by
    seed.
    """
    lines = [
        (
            "| hints | agents' reuse % | TTFT mean ms | p95 | p99 | mean over none | p95 over none "
            "| others' TTFT mean ms |"
        ),
        "|---|---|---|---|---|---|---|---|",
    ]
    none = [o for o in outcomes if o.hints == "none"]
    for hints in _HINTS:
        runs = [o for o in outcomes if o.hints == hints]
        pairs = list(zip(runs, none, strict=True))
        cells = [
            Spread.of([o.reuse_percent for o in runs]).text(".1f"),
            Spread.of([o.ttft_ms_mean for o in runs]).text(".0f"),
            Spread.of([o.ttft_ms_p95 for o in runs]).text(".0f"),
            Spread.of([o.ttft_ms_p99 for o in runs]).text(".0f"),
            Spread.of([o.ttft_ms_mean / n.ttft_ms_mean for o, n in pairs]).text(".2f"),
            Spread.of([o.ttft_ms_p95 / n.ttft_ms_p95 for o, n in pairs]).text(".2f"),
            Spread.of([o.others_ms_mean for o in runs]).text(".0f"),
        ]
        lines.append(f"| {hints} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write OUT.json and OUT.md")
    options = parser.parse_args()
    outcomes = [play(h, seed) for h in _HINTS for seed in range(1, options.seeds + 1)]
    text = table(outcomes)
    print(text)
    if options.out:
        write(
            options.out,
            "loadtests.placement.session_hints",
            "Session hints on agents beside prompts that nobody asks for again",
            "Simulated: the mesh's own cores decide on a virtual clock, and the product's eviction "
            "in host pools of 256 blocks. Median (lowest..highest) over the seeds. All rows are "
            "of one run, and of the same requests.",
            text,
            outcomes=[asdict(o) for o in outcomes],
        )


if __name__ == "__main__":
    main()
