"""Does placement generalise? Its constants are chosen on all families but one, and judged on that
one, beside seven other policies (`make bench NAME=placement-generalises`).

    make bench NAME=placement-generalises TRACES=FOLDER          # about five minutes on a core
    python -m loadtests.placement.generalises --families "toolagent;agents" --seeds 1

Runs are on the virtual clock: the product's own cores decide. A seed is another part of a trace, or
another draw of a family. Azure's traces have lengths and times only, so nothing is reused there.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Final

from loadtests.harness.progress import Progress
from loadtests.harness.results import Spread, quantile, write
from loadtests.harness.verdicts import OURS, Measure, verdicts
from loadtests.placement import families
from loadtests.placement.unknown_laws import tiled
from loadtests.sim.mesh import MeshShape, VirtualMesh
from loadtests.traffic.workloads import Arrival, azure, mooncake, trace_file
from pdmesh.core.placement.baselines import POLICIES, default
from pdmesh.core.placement.expected_completion import Prices
from pdmesh.core.placement.policies import Weights
from pdmesh.engine.laws import MOCKER, SMOLLM2_CPU

_MOONCAKE: Final = "mooncake_conversation_trace.jsonl"
_FUSION: Final = MeshShape(MOCKER, num_fusion=4, num_blocks=2048, block_size=families.BLOCK)
_PAIRS: Final = replace(_FUSION, num_fusion=0, num_prefill=4, num_decode=4, prefill_slots=16)
_BEGINNING: Final = 20  # spans that the predictor learns from before it is judged
FUTURES: Final = (0.0, 3.0, 6.0, 12.0)
BALANCES: Final = (0.0, 1.0, 3.0)
DEFAULT: Final = Prices()


@dataclass(frozen=True, slots=True)
class Family:
    """`arrivals(traces, seed)`."""

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
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run. `busiest`: the prompts of the busiest instance that prefills over their mean.

    `home_percent`: of the turns after a session's first, how many went where the last turn was.
    """

    family: str
    policy: str
    seed: int
    reuse_percent: float
    ttft_ms_mean: float
    ttft_ms_p95: float
    ttft_ms_p99: float
    busiest: float
    home_percent: float
    prediction_error_percent: float
    wait_error_percent: float


def play(
    name: str, seed: int, traces: Path | None, policy: str = OURS, prices: Prices = DEFAULT
) -> Outcome:
    family = FAMILIES[name]
    return outcome_of(family.shape, family.arrivals(traces, seed), (name, policy, seed), prices)


def outcome_of(
    shape: MeshShape, arrivals: Sequence[Arrival], names: tuple[str, str, int], prices: Prices
) -> Outcome:
    """Play the arrivals. `names`: family, policy, seed."""
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


# --- which constants -------------------------------------------------------------------------------


def badness(runs: Sequence[Outcome]) -> float:
    """One number of a family's runs, of which only ratios count: the product of what should be
    low, and of 1/reuse.
    """
    mean = {m.name: max(1e-6, m.of(runs).median) for m in MEASURES}
    reuse = mean.pop("reuse, %")
    return math.prod(mean.values()) / max(1.0, reuse)


def chosen_without(tried: Mapping[Prices, Mapping[str, float]], left_out: str) -> Prices:
    """The constants that are best on all families but one; `tried` has the badness by family."""

    def on_others(prices: Prices) -> float:
        return sum(math.log(bad) for name, bad in tried[prices].items() if name != left_out)

    return min(tried, key=on_others)


MEASURES: Final[tuple[Measure[Outcome], ...]] = (
    Measure("reuse, %", lambda o: o.reuse_percent, ".1f", is_more_better=True),
    Measure("TTFT mean, ms", lambda o: o.ttft_ms_mean, ".0f"),
    Measure("TTFT p95, ms", lambda o: o.ttft_ms_p95, ".0f"),
    Measure("TTFT p99, ms", lambda o: o.ttft_ms_p99, ".0f"),
    Measure("busiest/mean", lambda o: o.busiest, ".2f"),
)
_JUDGED: Final = MEASURES[:4]


def dominated_by(by_policy: Mapping[str, Sequence[Outcome]]) -> list[str]:
    """Policies that are at least as good as ours in every judged measure, and better in one."""
    ours = [m.of(by_policy[OURS]).median for m in _JUDGED]
    found = []
    for policy, runs in by_policy.items():
        theirs = [m.of(runs).median for m in _JUDGED]
        pairs = list(zip(_JUDGED, theirs, ours, strict=True))
        is_as_good = not any(m.is_better(our, their) for m, their, our in pairs)
        if is_as_good and any(m.is_better(their, our) for m, their, our in pairs):
            found.append(policy)
    return found


def _family_table(
    name: str, by_policy: Mapping[str, Sequence[Outcome]], prices: Prices, seeds: int
) -> str:
    head = (
        f"\n### {name}\n\nJudged with future {prices.future:g} and balance {prices.balance:g}, "
        f"chosen on the other families ({seeds} seeds).\n\n"
        "| policy | reuse % | TTFT mean ms | p95 | p99 | busiest/mean | turns at home % | error % |\n"
        "|---|---|---|---|---|---|---|---|"
    )
    rows = []
    for policy, runs in by_policy.items():
        cells = [m.of(runs).text(m.form) for m in MEASURES]
        cells.append(Spread.of([o.home_percent for o in runs]).text(".0f"))
        cells.append(Spread.of([o.prediction_error_percent for o in runs]).text(".1f"))
        rows.append(f"| {policy} | {' | '.join(cells)} |")
    better = dominated_by(by_policy)
    front = (
        f"Ours is **not on the Pareto front**: {', '.join(better)}."
        if better
        else "Ours is on the Pareto front."
    )
    return "\n".join([head, *rows, "", verdicts(by_policy, _JUDGED), f"- {front}"])


def _summary(judged: Mapping[str, Mapping[str, Sequence[Outcome]]]) -> str:
    """Ours against each other policy: geometric means of the ratios over all families."""
    lines = [
        "\n## All families\n",
        "Theirs over ours, geometric mean over the families (reuse: ours over theirs, where there "
        "is any). Above 1, ours is better.\n",
        "| policy | reuse | TTFT mean | p95 | p99 | on the front |",
        "|---|---|---|---|---|---|",
    ]
    policies = [p for p in next(iter(judged.values())) if p != OURS]
    for policy in policies:
        cells = [f"{_ratio(judged, policy, m):.2f}" for m in _JUDGED]
        num_dominating = sum(policy in dominated_by(by) for by in judged.values())
        lines.append(
            f"| {policy} | {' | '.join(cells)} | dominates ours in {num_dominating} of "
            f"{len(judged)} |"
        )
    return "\n".join(lines)


def _ratio(
    judged: Mapping[str, Mapping[str, Sequence[Outcome]]], policy: str, measure: Measure[Outcome]
) -> float:
    logs = []
    for by_policy in judged.values():
        ours, theirs = (measure.of(by_policy[p]).median for p in (OURS, policy))
        if ours > 0 and theirs > 0:
            logs.append(math.log(ours / theirs if measure.is_more_better else theirs / ours))
    return math.exp(statistics.fmean(logs)) if logs else math.nan


# --- the predictor, and tiers ------------------------------------------------------------------------


def predictor_table(traces: Path | None, names: Sequence[str], seeds: int) -> str:
    """MAPE by family and law; only the first law is one whose form the formula has."""
    laws: dict[str, Callable[[], MeshShape]] = {}
    lines = [
        "\n## Predictor\n",
        "MAPE of a span of prompts, predicted from what was learnt before it; after the semicolon "
        "that of the time from the plan to the first token, as expected with the plan.\n",
        "| family | mocker | smollm2-cpu | tiles | tiles, 10 % noise |",
        "|---|---|---|---|---|",
    ]
    for name in names:
        shape = FAMILIES[name].shape
        laws = {
            "mocker": lambda s=shape: s,
            "smollm2": lambda s=shape: replace(s, law=SMOLLM2_CPU),
            "tiles": lambda s=shape: replace(s, law=tiled(0.0)),
            "noise": lambda s=shape: replace(s, law=tiled(0.1)),
        }
        cells = []
        for law, made in laws.items():
            errors, waits = [], []
            for seed in range(1, seeds + 1):
                arrivals = FAMILIES[name].arrivals(traces, seed)
                if law == "smollm2":  # twenty times as slow
                    arrivals = [replace(a, at_s=20 * a.at_s) for a in arrivals]
                run = outcome_of(made(), arrivals, (name, OURS, seed), DEFAULT)
                errors.append(run.prediction_error_percent)
                waits.append(run.wait_error_percent)
            cells.append(f"{Spread.of(errors).text('.1f')}; {Spread.of(waits).text('.0f')}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def tiers_table(seeds: int) -> str:
    """A working set of 1.3 times the engines' caches, and host pools that hold the rest."""
    lines = [
        "\n## Tiers\n",
        "Sixty prefixes of 22 blocks: 1.3 times the engines' 1,024 blocks; each host pool has 512. "
        "In the second pair of rows, instances cannot fetch from each other's pools.\n",
        "| placement | reuse % | TTFT mean ms | p95 | p99 |",
        "|---|---|---|---|---|",
    ]
    for pools, is_shared in (("shared pools", True), ("own pools", False)):
        shape = replace(_FUSION, num_blocks=256, host_blocks=512, shares_host=is_shared)
        means = []
        for label, tells in (("knows the tiers", True), ("knows the engines' blocks", False)):
            runs = [
                outcome_of(
                    replace(shape, tells_peers=tells, tells_host=tells),
                    families.working_set(seed, 800),
                    (pools, OURS, seed),
                    DEFAULT,
                )
                for seed in range(1, seeds + 1)
            ]
            cells = " | ".join(m.of(runs).text(m.form) for m in _JUDGED)
            means.append(statistics.median(o.ttft_ms_mean for o in runs))
            lines.append(f"| {label}, {pools} | {cells} |")
        lower = 100 * (1 - means[0] / means[1])
        lines.append(f"| *mean TTFT {lower:.0f} % lower* | | | | |")
    lines.append("\nAsked: 40 % lower.")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--traces", type=Path, help="folder of the public traces")
    parser.add_argument("--families", default=";".join(FAMILIES), help="separated by ;")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="write OUT.json and OUT.md")
    options = parser.parse_args()
    names = [name.strip() for name in options.families.split(";")]
    unknown = [name for name in names if name not in FAMILIES]
    if unknown:
        parser.error(f"--families: no family is called {unknown[0]!r}")
    seeds = range(1, options.seeds + 1)
    grid = [Prices(future=f, balance=b) for f, b in itertools.product(FUTURES, BALANCES)]
    progress = Progress(len(names) * (len(grid) + len(POLICIES) - 1))

    def run(name: str, **how: object) -> list[Outcome]:
        runs = [play(name, s, options.traces, **how) for s in seeds]  # type: ignore[arg-type]
        progress.step(name)
        return runs

    ours = {prices: {name: run(name, prices=prices) for name in names} for prices in grid}
    tried = {p: {n: badness(r) for n, r in by.items()} for p, by in ours.items()}
    others = [p for p in POLICIES if p != OURS]
    judged: dict[str, dict[str, list[Outcome]]] = {}
    tables = []
    for name in names:
        prices = chosen_without(tried, name)
        judged[name] = {OURS: ours[prices][name], **{p: run(name, policy=p) for p in others}}
        tables.append(_family_table(name, judged[name], prices, options.seeds))
    progress.close()
    on_all = chosen_without(tried, "")
    text = "\n".join(
        [
            _summary(judged),
            f"\nBest on all families: future {on_all.future:g}, balance {on_all.balance:g}; the "
            f"defaults are {DEFAULT.future:g} and {DEFAULT.balance:g}.",
            predictor_table(options.traces, names, options.seeds),
            tiers_table(options.seeds),
            "\n## Leave one out",
            *tables,
        ]
    )
    print(text)
    if options.out:
        _write(options.out, judged, text)


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
