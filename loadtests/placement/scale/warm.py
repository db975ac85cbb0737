"""What a shortlist costs in quality: TTFT and reuse with it, and with all instances scored (`make
bench NAME=shortlist`).

    python -m loadtests.placement.scale.warm --seeds 3 --out loadtests/results/shortlist-2026-11-28
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from loadtests.harness.progress import Progress
from loadtests.harness.results import Spread, quantile, spread_table, write
from loadtests.placement import families
from loadtests.sim.mesh import MeshShape, VirtualMesh
from loadtests.traffic.workloads import Arrival
from pdmesh.core.instance.admission import Work
from pdmesh.core.placement.baselines import POLICIES
from pdmesh.core.placement.instance import Instance
from pdmesh.core.placement.policies import MOST_SCORED, Known, Policy, Query, Weights
from pdmesh.engine.step_time_laws import MOCKER

_ABOUT: Final = (
    "The simulation runs on the virtual clock with one group of 320 prefills and 120 decodes, "
    "so a shortlist has less than a third of the prefills. Prompts take 32 times as long as "
    "on the mocker. With these times, a run of thousands of requests lasts about as long as "
    "placement remembers recent work. The first three eighths of the requests warm up the "
    "caches and are not counted. Each run begins with empty caches, so a shortlist also "
    "affects what the caches hold. `busy` is the share of prefills that have a prompt, at "
    "forty times while the counted requests arrive. 'Against its own mean' compares an "
    "instance with the mean of the shortlist, as the product did before this measurement. "
    "With --chance, another run scores all instances with other random draws. Its difference "
    "from the first run is chance."
)
_PREFILLS: Final = 320
# the families are made for meshes of four instances; this mesh is as large as so many
_MESHES: Final = _PREFILLS // 4
_SLOWER: Final = 32.0
# blocks of a prompt; the few longer prompts are left out, since they are heavy
_MOST_BLOCKS: Final = 96
_LOOKS: Final = 40
_WARM_UP: Final = 3 / 8  # share of the requests
_SHAPE: Final = MeshShape(
    replace(
        MOCKER,
        name="mocker, 32 times as slow",
        prefill_fixed_s=_SLOWER * MOCKER.prefill_fixed_s,
        prefill_token_s=_SLOWER * MOCKER.prefill_token_s,
        prefill_pair_s=_SLOWER * MOCKER.prefill_pair_s,
    ),
    num_prefill=_PREFILLS,
    num_decode=120,
    num_blocks=192,
    decode_blocks=4096,
    block_size=families.BLOCK,
    decode_law=MOCKER,
)


def tools(seed: int, count: int) -> list[Arrival]:
    """Requests of one population: all use the same forty tool definitions, and sessions
    continue.
    """
    return _poisson(families.toolagent(seed, count, num_recent=60 * _MESHES), seed, 90.0)


def tenants(seed: int, count: int) -> list[Arrival]:
    """Requests of eighty tenants. Each has its own tool definitions, which few instances hold."""
    rng = random.Random(seed)
    asked = [
        (number + rng.random(), _of_tenant(arrival, tenant))
        for tenant in range(_MESHES)
        for number, arrival in enumerate(families.toolagent(1000 * seed + tenant, count // _MESHES))
    ]
    return _poisson([a for _, a in sorted(asked, key=_turn)], seed, 65.0)


def hot_prefixes(seed: int, count: int) -> list[Arrival]:
    """Requests with 4,800 prefixes by Zipf's law, which do not fit into the caches."""
    return _poisson(families.hot_prefixes(seed, count, num_heads=60 * _MESHES), seed, 105.0)


def agents(seed: int, count: int) -> list[Arrival]:
    """Requests of sessions with pauses. They share a system prompt, which every instance soon
    holds.
    """
    asked = families.agents(seed, count // 8, apart_s=0.1)
    return [replace(a, at_s=a.at_s / 2) for a in asked]


FAMILIES: Final[Mapping[str, Callable[[int, int], list[Arrival]]]] = {
    "tools": tools,
    "tenants' tools": tenants,
    "hot prefixes": hot_prefixes,
    "agents": agents,
}


@dataclass(frozen=True, slots=True)
class Variant:
    name: str
    most_scored: int  # 0: all are scored
    other_draws: int = 0
    by_its_own_mean: bool = False  # an instance is compared with the mean of the shortlist


ALL: Final = Variant("all scored", 0)
SHORTLIST: Final = Variant("shortlist", MOST_SCORED)
OWN_MEAN: Final = Variant("shortlist, against its own mean", MOST_SCORED, by_its_own_mean=True)
CHANCE: Final = Variant("all scored, other draws", 0, 1_000_000)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The results of one run. `busy_percent` is the share of prefills that have a prompt."""

    family: str
    variant: str
    seed: int
    num_counted: int
    num_refused: int
    reuse_percent: float
    ttft_s_mean: float
    ttft_s_p95: float
    ttft_s_p99: float
    busy_percent: float


def play(family: str, variant: Variant, seed: int, count: int) -> Outcome:
    mesh = VirtualMesh(_SHAPE, "default", seed + variant.other_draws, Weights())
    mesh.placement.policy = _policy(variant)
    asked = [a for a in FAMILIES[family](seed, count) if len(a.blocks) <= _MOST_BLOCKS]
    begin_s, end_s = asked[int(_WARM_UP * len(asked))].at_s, asked[-1].at_s
    num_busy = list[int]()

    def look() -> None:
        prefills = (w for w in mesh.workers.values() if w.work is Work.PREFILL)
        num_busy.append(sum(w.admission.num_slots_used > 0 for w in prefills))

    for number in range(_LOOKS):
        mesh.clock.at(begin_s + (end_s - begin_s) * number / _LOOKS, look)
    mesh.run(asked)
    counted = [s for s in mesh.served if s.arrival.at_s >= begin_s]
    done = [s for s in counted if not s.is_refused]
    ttft = sorted(s.ttft_s for s in done)
    num_prompt_tokens = sum(s.arrival.num_prompt_tokens for s in done)
    return Outcome(
        family,
        variant.name,
        seed,
        len(counted),
        len(counted) - len(done),
        100 * sum(s.num_cached_tokens for s in done) / num_prompt_tokens,
        statistics.fmean(ttft),
        quantile(ttft, 0.95),
        quantile(ttft, 0.99),
        100 * statistics.fmean(num_busy) / _PREFILLS,
    )


def _policy(variant: Variant) -> Policy:
    own = POLICIES["default"]()

    def by_own_mean(query: Query, asked: Sequence[Instance], known: Known) -> Sequence[float]:
        return own.score_prefills(query, asked, replace(known, typical=None))

    scores = by_own_mean if variant.by_its_own_mean else own.score_prefills
    return replace(own, most_scored=variant.most_scored, score_prefills=scores)


_FIGURES: Final[Sequence[tuple[str, Callable[[Outcome], float], str]]] = (
    ("reuse %", lambda o: o.reuse_percent, ".1f"),
    ("TTFT mean s", lambda o: o.ttft_s_mean, ".3f"),
    ("p95", lambda o: o.ttft_s_p95, ".3f"),
    ("p99", lambda o: o.ttft_s_p99, ".3f"),
)


def tables(outcomes: Sequence[Outcome]) -> str:
    """Tables of the results, and of each variant divided by all scored with the same arrivals."""
    rows = [
        ((family, variant.name), runs)
        for family in FAMILIES
        for variant in (ALL, SHORTLIST, OWN_MEAN, CHANCE)
        if (runs := [o for o in outcomes if (o.family, o.variant) == (family, variant.name)])
    ]
    columns = [*_FIGURES, ("busy %", lambda o: o.busy_percent, ".0f")]
    lines = [spread_table(("family", "scored"), columns, rows), "", "Over all scored:", ""]
    lines += [
        f"| family | variant | {' | '.join(name for name, _, _ in _FIGURES)} |",
        "|---" * (2 + len(_FIGURES)) + "|",
    ]
    base = {(o.family, o.seed): o for o in outcomes if o.variant == ALL.name}
    for (family, variant), runs in rows:
        pairs = [(o, b) for o in runs if (b := base.get((o.family, o.seed))) is not None]
        if variant != ALL.name and pairs:
            cells = [
                Spread.of([value(o) / value(b) for o, b in pairs]).text(".3f")
                for _, value, _ in _FIGURES
            ]
            lines.append(f"| {family} | {variant} | {' | '.join(cells)} |")
    num_refused = sum(o.num_refused for o in outcomes)
    return "\n".join([*lines, "", f"Refused requests: {num_refused}."])


def _poisson(asked: Sequence[Arrival], seed: int, rate_per_s: float) -> list[Arrival]:
    """The same requests in the same order, at Poisson times."""
    rng, now, arrivals = random.Random(seed), 0.0, list[Arrival]()
    for arrival in asked:
        now += rng.expovariate(rate_per_s)
        arrivals.append(replace(arrival, at_s=now))
    return arrivals


def _turn(numbered: tuple[float, Arrival]) -> float:
    return numbered[0]


def _of_tenant(arrival: Arrival, tenant: int) -> Arrival:
    """The same request with block names that only this tenant has.

    The names of the families do not use the bytes that are changed here.
    """
    mark = tenant.to_bytes(2, "little")
    return replace(arrival, blocks=tuple(b[:6] + mark + b[8:] for b in arrival.blocks))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=textwrap.fill(_ABOUT, 100),
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--families", default=";".join(FAMILIES), help="separated by ;")
    parser.add_argument("--chance", action="store_true", help="all scored with other draws, too")
    parser.add_argument("--kept", type=Path, help="a file of runs, which are not repeated")
    parser.add_argument("--out", type=Path, help="write OUT.json and OUT.md")
    options = parser.parse_args()
    names = options.families.split(";")
    if unknown := [name for name in names if name not in FAMILIES]:
        parser.error(f"--families: no family is called {unknown[0]!r}")
    variants = [ALL, SHORTLIST, OWN_MEAN, *([CHANCE] if options.chance else [])]
    progress = Progress(options.seeds * len(names) * len(variants))
    kept, outcomes = _kept(options.kept), list[Outcome]()
    for seed in range(1, options.seeds + 1):
        for family in names:
            for variant in variants:
                progress.step(f"{family}, {variant.name}, seed {seed}")
                done = kept.get((family, variant.name, seed, options.requests))
                outcomes.append(done or play(family, variant, seed, options.requests))
                if options.kept and not done:
                    line = json.dumps([options.requests, asdict(outcomes[-1])])
                    with options.kept.open("a") as file:
                        file.write(f"{line}\n")
            if options.out:  # write after each run, since the program may be interrupted
                _write(options.out, outcomes)
    progress.close()
    print(tables(outcomes))


def _kept(path: Path | None) -> dict[tuple[str, str, int, int], Outcome]:
    """The runs of earlier calls, by family, variant, seed and number of requests.

    Delete the file when the code changes.
    """
    lines = path.read_text().splitlines() if path is not None and path.exists() else []
    runs = [(count, Outcome(**outcome)) for count, outcome in map(json.loads, lines)]
    return {(o.family, o.variant, o.seed, count): o for count, o in runs}


def _write(out: Path, outcomes: Sequence[Outcome]) -> None:
    write(
        out,
        "loadtests.placement.scale.warm",
        "What a shortlist costs on warm caches",
        f"{_ABOUT} A shortlist has {MOST_SCORED}. Median (lowest..highest) over the seeds.",
        tables(outcomes),
        outcomes=[asdict(o) for o in outcomes],
    )


if __name__ == "__main__":
    main()
