"""Checks whether placement generalises: its constants are chosen on all families but one, and
judged on that one, beside seven other policies (`make bench NAME=placement-generalises`).

    make bench NAME=placement-generalises TRACES=FOLDER          # about five minutes on a core
    python -m loadtests.placement.generalises --families "toolagent;agents" --seeds 1

With --kept FILE, each run becomes a line in the file. It is not repeated, so the next call
continues an interrupted one. Delete the file when the code changes.

Runs are on the virtual clock, with the product's own cores. A seed selects another part of a trace,
or other random numbers for a family. Azure's traces have only lengths and times, so no blocks are
reused in them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Final

from loadtests.harness.progress import Progress
from loadtests.harness.results import Spread, quantile, write
from loadtests.harness.verdicts import OURS
from loadtests.placement import families
from loadtests.placement.generalises_report import (
    JUDGED,
    Outcome,
    badness,
    chosen_without,
    defaults_table,
    family_table,
    summary,
)
from loadtests.placement.unknown_laws import tiled
from loadtests.sim.mesh import MeshShape, VirtualMesh
from loadtests.traffic.workloads import Arrival, azure, mooncake, trace_file
from pdmesh.core.instance.step_time_law import Law
from pdmesh.core.placement.baselines import POLICIES, default
from pdmesh.core.placement.expected_completion import Prices
from pdmesh.core.placement.policies import Weights
from pdmesh.engine.sim.config import CHUNK_TOKENS
from pdmesh.engine.step_time_laws import MOCKER, SMOLLM2_CPU

_MOONCAKE: Final = "mooncake_conversation_trace.jsonl"
_FUSION: Final = MeshShape(MOCKER, num_fusion=4, num_blocks=2048, block_size=families.BLOCK)
_PAIRS: Final = replace(_FUSION, num_fusion=0, num_prefill=4, num_decode=4, prefill_slots=16)
# RTP-LLM's two workloads (S131), as in `loadtests.placement.compare`.
_RTP: Final = MeshShape(
    SMOLLM2_CPU, num_prefill=8, num_decode=2, decode_blocks=16_384, chunk_tokens=CHUNK_TOKENS
)
_BEGINNING: Final = 20  # the first spans, from which the predictor learns before it is judged
FUTURES: Final = (0.0, 6.0, 12.0)
BALANCES: Final = (5.0, 10.0)
DEFAULT: Final = Prices()


@dataclass(frozen=True, slots=True)
class Family:
    """A mesh and its load. `arrivals(traces, seed)` makes the load."""

    shape: MeshShape
    arrivals: Callable[[Path | None, int], list[Arrival]]


@lru_cache
def _conversation(traces: Path | None) -> list[Arrival]:
    return mooncake(trace_file(traces, _MOONCAKE), families.BLOCK)


@lru_cache
def _azure(traces: Path | None, name: str) -> list[Arrival]:
    return azure(trace_file(traces, f"AzureLLMInferenceTrace_{name}.csv"), name)


FAMILIES: Final[Mapping[str, Family]] = {
    "Mooncake conversation": Family(
        _FUSION, lambda t, s: families.window(_conversation(t), s, 800)
    ),
    "Mooncake conversation, P/D, 1.4x": Family(
        _PAIRS, lambda t, s: families.window(_conversation(t), s, 800, 0.7)
    ),
    "Azure code, P/D 2+2, 10x": Family(
        replace(_PAIRS, num_prefill=2, num_decode=2),
        lambda t, s: families.window(_azure(t, "code"), s, 800, 0.1),
    ),
    "Azure conversation, P/D 3+3, 10x": Family(
        replace(_PAIRS, num_prefill=3, num_decode=3),
        lambda t, s: families.window(_azure(t, "conv"), s, 1000, 0.1),
    ),
    "toolagent": Family(_FUSION, lambda t, s: families.toolagent(s, 1200)),
    "toolagent, 8 small caches": Family(
        replace(_FUSION, num_fusion=8, num_blocks=512), lambda t, s: families.toolagent(s, 1200)
    ),
    "toolagent, P/D": Family(_PAIRS, lambda t, s: families.toolagent(s, 1200)),
    "documents": Family(_FUSION, lambda t, s: families.documents(s, 800)),
    "hot prefixes, small caches": Family(
        replace(_FUSION, num_blocks=160), lambda t, s: families.hot_prefixes(s, 800)
    ),
    "bursts": Family(_FUSION, lambda t, s: families.bursts(s, 800)),
    "long tail": Family(_FUSION, lambda t, s: families.long_tail(s, 800)),
    "agents, 2 instances": Family(
        replace(_FUSION, num_fusion=2), lambda t, s: families.agents(s, 56)
    ),
    "agents, 6 instances": Family(
        replace(_FUSION, num_fusion=6), lambda t, s: families.agents(s, 100, apart_s=0.7)
    ),
    "RTP-LLM short chats, P/D 8+2": Family(
        replace(_RTP, num_blocks=52), lambda t, s: families.rtp_short_chats(s, 720)
    ),
    "RTP-LLM long prompts, P/D 8+2": Family(
        replace(_RTP, num_blocks=64), lambda t, s: families.rtp_long_prompts(s, 300)
    ),
}


def play(
    name: str, seed: int, traces: Path | None, policy: str = OURS, prices: Prices = DEFAULT
) -> Outcome:
    family = FAMILIES[name]
    return outcome_of(family.shape, family.arrivals(traces, seed), (name, policy, seed), prices)


def outcome_of(
    shape: MeshShape, arrivals: Sequence[Arrival], names: tuple[str, str, int], prices: Prices
) -> Outcome:
    """Play the arrivals. `names` are the family, the policy and the seed."""
    _, policy, seed = names
    mesh = VirtualMesh(shape, policy, seed, Weights())
    if policy == OURS:
        mesh.placement.policy = default(prices)
    mesh.run(arrivals)
    done = [s for s in mesh.served if not s.is_refused]
    ttft = sorted(1e3 * s.ttft_s for s in done)
    prefilling = [w for w in mesh.workers.values() if not w.instance_id.startswith("decode")]
    counts = [w.num_prompts for w in prefilling]
    errors = mesh.errors[_BEGINNING:] or mesh.errors
    return Outcome(
        *names,
        100
        * sum(s.num_cached_tokens // shape.block_size for s in done)
        / max(1, sum(len(s.arrival.blocks) for s in done)),
        statistics.fmean(ttft),
        quantile(ttft, 0.95),
        quantile(ttft, 0.99),
        max(counts) / statistics.fmean(counts),
        _home_percent(mesh),
        100 * statistics.fmean(errors),
        100 * statistics.fmean(mesh.wait_errors[_BEGINNING:]),
    )


def _home_percent(mesh: VirtualMesh) -> float:
    last: dict[str, str] = {}
    num_turns = num_home = 0
    for served in sorted(mesh.served, key=lambda s: s.arrival.at_s):
        chat = served.arrival.chat_id
        if chat in last:
            num_turns += 1
            num_home += last[chat] == served.prefill_id
        if chat:
            last[chat] = served.prefill_id
    return 100 * num_home / num_turns if num_turns else math.nan


# --- the predictor, and tiers


LAWS: Final[Mapping[str, Callable[[], Law]]] = {
    "mocker": lambda: MOCKER,
    "smollm2-cpu": lambda: SMOLLM2_CPU,
    "tiles": lambda: tiled(0.0),
    "tiles, 10 % noise": lambda: tiled(0.1),
}
# factor on the times of arrivals, for laws that are slower than the mocker's
_TIMES: Final = {"smollm2-cpu": 20.0}


def predictor_table(traces: Path | None, names: Sequence[str], seeds: int) -> str:
    """A table of MAPE by family and law. Only the first two laws have the form of the predictor's
    formula.
    """
    lines = [
        "\n## Predictor\n",
        (
            "MAPE of the compute of a span of prompts, predicted from what was learnt before it; "
            "after the semicolon that of the time from the plan to the first token, as expected "
            "with the plan.\n"
        ),
        f"| family | {' | '.join(LAWS)} |",
        "|---" * (1 + len(LAWS)) + "|",
    ]
    for name in names:
        cells = []
        for law in LAWS:
            runs = [_play_law(traces, name, law, seed) for seed in range(1, seeds + 1)]
            errors = Spread.of([o.prediction_error_percent for o in runs]).text(".1f")
            cells.append(f"{errors}; {Spread.of([o.wait_error_percent for o in runs]).text('.0f')}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _play_law(traces: Path | None, name: str, law: str, seed: int) -> Outcome:
    family, factor = FAMILIES[name], _TIMES.get(law, 1.0)
    arrivals = [replace(a, at_s=factor * a.at_s) for a in family.arrivals(traces, seed)]
    return outcome_of(replace(family.shape, law=LAWS[law]()), arrivals, (name, OURS, seed), DEFAULT)


def tiers_table(seeds: int) -> str:
    """A table of runs with a working set of 1.3 times the engines' caches.

    Host pools hold the rest of the working set.
    """
    lines = [
        "\n## Tiers\n",
        (
            "Sixty prefixes of 22 blocks: 1.3 times the engines' 1,024 blocks; each host pool has "
            "512. With own pools, instances cannot fetch from each other's.\n"
        ),
        "| placement | reuse % | TTFT mean ms | p95 | p99 |",
        "|---|---|---|---|---|",
    ]
    for pools, is_shared in (("shared pools", True), ("own pools", False)):
        means = []
        for label, tells in (("knows the tiers", True), ("knows the engines' blocks", False)):
            shape = replace(
                _FUSION,
                num_blocks=256,
                host_blocks=512,
                shares_host=is_shared,
                tells_peers=tells,
                tells_host=tells,
            )
            runs = [
                outcome_of(shape, families.working_set(s, 800), (pools, OURS, s), DEFAULT)
                for s in range(1, seeds + 1)
            ]
            means.append(statistics.median(o.ttft_ms_mean for o in runs))
            cells = " | ".join(m.of(runs).text(m.form) for m in JUDGED)
            lines.append(f"| {label}, {pools} | {cells} |")
        lower = 100 * (1 - means[0] / means[1])
        lines.append(f"| *mean TTFT {lower:.0f} % lower* | | | | |")
    return "\n".join([*lines, "\nAsked: 40 % lower."])


class KeptRuns:
    """The outcomes of runs, in a file if a path is given."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._outcomes: dict[str, Outcome] = {}
        if path is not None and path.exists():
            for line in path.read_text().splitlines():
                key, outcome = json.loads(line)
                self._outcomes[key] = Outcome(**outcome)

    def get(self, key: str, run: Callable[[], Outcome]) -> Outcome:
        """The outcome for `key`. If there is none, `run` is called."""
        found = self._outcomes.get(key)
        if found is None:
            found = self._outcomes[key] = run()
            if self._path is not None:
                with self._path.open("a") as file:
                    file.write(json.dumps([key, asdict(found)]) + "\n")
        return found


class Comparison:
    """All runs: our policy with each combination of constants, and the other policies."""

    def __init__(
        self, names: Sequence[str], traces: Path | None, seeds: int, kept: KeptRuns
    ) -> None:
        self._names, self._traces, self._seeds, self._kept = names, traces, seeds, kept
        self._grid = [Prices(future=f, balance=b) for f, b in itertools.product(FUTURES, BALANCES)]
        self._others = [p for p in POLICIES if p != OURS]
        self._progress = Progress(len(names) * (len(self._grid) + len(self._others)))
        self.judged: dict[str, dict[str, list[Outcome]]] = {}

    def run(self) -> str:
        """Make all runs and return the report. Then `judged` has the judged runs."""
        ours = {p: {n: self._play(n, OURS, p) for n in self._names} for p in self._grid}
        tried = {p: {n: badness(runs) for n, runs in by.items()} for p, by in ours.items()}
        tables = []
        for name in self._names:
            prices = chosen_without(tried, name)
            others = {p: self._play(name, p, DEFAULT) for p in self._others}
            self.judged[name] = {OURS: ours[prices][name], **others}
            tables.append(family_table(name, self.judged[name], prices, self._seeds))
        self._progress.close()
        best = chosen_without(tried, "")
        defaults = {
            name: {OURS: ours[DEFAULT][name], **{p: by[p] for p in self._others}}
            for name, by in self.judged.items()
        }
        return "\n".join(
            [
                summary(self.judged),
                (
                    f"\nBest on all families: future {best.future:g}, balance {best.balance:g}; "
                    f"the defaults are {DEFAULT.future:g} and {DEFAULT.balance:g}."
                ),
                defaults_table(defaults),
                predictor_table(self._traces, self._names[::2], self._seeds),
                tiers_table(self._seeds),
                "\n## Leave one out",
                *tables,
            ]
        )

    def _play(self, name: str, policy: str, prices: Prices) -> list[Outcome]:
        runs = [
            self._kept.get(
                json.dumps([name, policy, seed, asdict(prices)]),
                partial(play, name, seed, self._traces, policy, prices),
            )
            for seed in range(1, self._seeds + 1)
        ]
        self._progress.step(f"{name}, {policy}")
        return runs


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--traces", type=Path, help="folder of the public traces")
    parser.add_argument("--families", default=";".join(FAMILIES), help="separated by ;")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--kept", type=Path, help="a file of runs, which are not repeated")
    parser.add_argument("--out", type=Path, help="write OUT.json and OUT.md")
    options = parser.parse_args()
    names = [name.strip() for name in options.families.split(";")]
    unknown = [name for name in names if name not in FAMILIES]
    if unknown:
        parser.error(f"--families: no family is called {unknown[0]!r}")
    comparison = Comparison(names, options.traces, options.seeds, KeptRuns(options.kept))
    text = comparison.run()
    print(text)
    if options.out:
        _write(options.out, comparison.judged, text)


def _write(out: Path, judged: Mapping[str, Mapping[str, Sequence[Outcome]]], text: str) -> None:
    write(
        out,
        "loadtests.placement.generalises",
        "Placement on families of requests that did not choose its constants",
        "Simulated: the mesh's own cores decide on a virtual clock. Median (lowest..highest) over "
        "the seeds; a seed is another part of a trace, or another draw of a family. Mooncake's "
        "arrivals are in bursts at 3 s ticks, as traced. Azure's traces name no prefixes. "
        "`toolagent` and `documents` imitate Mooncake's tool & agent and synthetic traces, which "
        f"are not on this machine. Other constants: {asdict(DEFAULT)}.",
        text,
        outcomes=[asdict(o) for by in judged.values() for runs in by.values() for o in runs],
    )


if __name__ == "__main__":
    main()
