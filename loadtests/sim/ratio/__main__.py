"""All measurements of the ratio on the virtual clock: one command, one report with the spread over
seeds.

    # Everything: some ten minutes on two cores.
    python -m loadtests.sim.ratio --out loadtests/results/ratio-2026-11-21
    # Parts of it.
    python -m loadtests.sim.ratio --only sweep,paper --seeds 1
    # One part again; the other parts keep the results of FILE.json.
    python -m loadtests.sim.ratio --only faults --keep FILE.json --out OUT
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Final

from pydantic import TypeAdapter

from loadtests.harness.progress import Progress
from loadtests.harness.results import describe_machine, describe_versions
from loadtests.sim.ratio import aggregated, faults, loop, report, scale, sweep
from loadtests.sim.ratio.report import Results
from pdmesh.core.ratio.throughput import Split, splits

_KINDS: Final[dict[str, type[Any]]] = {
    "sweep": sweep.Best,
    "paper": sweep.Best,
    "change": loop.Change,
    "calm": loop.Calm,
    "convergence": loop.Convergence,
    "aggregated": aggregated.Goodput,
    "fault": faults.Outcome,
    "quiet": faults.Outcome,
    "scale": scale.Cost,
}
Job = tuple[str, Callable[[], Any]]
_NUM_QUIET: Final = 24  # runs without a fault, as a sample of the hours of a week between faults


def jobs(parts: Sequence[str], seeds: Sequence[int]) -> list[Job]:
    """The jobs of the named parts. They do not depend on each other.

    A job is the kind of its result, and the function that computes the result.
    """
    made: list[Job] = []
    if "sweep" in parts:
        for workload in sweep.WORKLOADS:
            made += [
                ("sweep", partial(sweep.best, workload, split, seed))
                for split in splits(sweep.TOTAL)
                for seed in seeds
            ]
    if "paper" in parts:
        made += [
            ("paper", partial(sweep.best, workload, split, seed))
            for workload in (sweep.PAPER, sweep.PAPER_LONGER)
            for split in sweep.PAPER_SPLITS
            for seed in seeds
        ]
    if "loop" in parts:
        made += [
            ("change", partial(loop.change, what, seed))
            for what in ("outputs +50 %", "prompts +50 %")
            for seed in seeds
        ]
        made += [("calm", partial(loop.calm, seed)) for seed in seeds]
        made += [
            ("convergence", partial(loop.converge, Split(n, sweep.TOTAL - n), seed))
            for n in range(2, sweep.TOTAL - 1)
            for seed in seeds
        ]
    if "aggregated" in parts:
        made += [
            ("aggregated", partial(aggregated.goodput, scene, mode, shape, seed))
            for scene in aggregated.SCENES
            for mode, shape in aggregated.modes(scene)
            for seed in seeds[: aggregated.MAX_SEEDS]
        ]
    if "faults" in parts:
        made += [
            ("fault", partial(faults.play, rate, episode, seed))
            for rate in faults.RATES
            for seed, episode in enumerate(faults.episodes(faults.machines_of_a_week(rate, 1)))
        ]
        made += [("quiet", partial(faults.quiet, seed)) for seed in range(_NUM_QUIET)]
    return made


def _play(job: Job) -> tuple[str, Any]:
    kind, work = job
    return kind, work()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", default="sweep,paper,loop,aggregated,faults,scale")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--out", type=Path, help="write OUT.json, OUT.md and OUT.png")
    parser.add_argument(
        "--keep", type=Path, help="take the results of other parts from this FILE.json"
    )
    options = parser.parse_args()
    parts = options.only.split(",")
    kept = json.loads(options.keep.read_text()) if options.keep else {}
    todo = jobs(parts, range(1, options.seeds + 1))
    results = Results()
    progress = Progress(len(todo) + 1)
    with ProcessPoolExecutor(options.processes) as pool:
        for kind, outcome in pool.map(_play, todo):
            progress.step(kind)
            results.add(kind, outcome)
    if "scale" in parts:
        progress.step("scale")
        for num_instances in (1_000, 10_000):
            for cost in scale.costs(num_instances):
                results.add("scale", cost)
    progress.close()
    played = {kind for kind, _ in results.items()}
    for kind, found in kept.get("results", {}).items():
        if kind not in played and kind in _KINDS:
            for each in found:
                results.add(kind, TypeAdapter(_KINDS[kind]).validate_python(each))
    text = report.markdown(results)
    print(text)
    if options.out:
        _write(options.out, results, text, kept)


def _write(out: Path, results: Results, text: str, kept: dict[str, Any]) -> None:
    from loadtests.sim.ratio.plots import draw  # matplotlib takes a second to import

    command = shlex.join(["python", "-m", "loadtests.sim.ratio", *sys.argv[1:]])
    data = {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "kept": {name: kept[name] for name in ("at", "command", "kept") if name in kept},
        "machine": describe_machine(),
        "versions": describe_versions(),
        "results": {kind: [asdict(each) for each in found] for kind, found in results.items()},
    }
    out.with_suffix(".json").write_text(json.dumps(data, indent=1, default=str) + "\n")
    head = f"# The ratio of prefills to decodes, simulated, {data['at']}\n\n`{command}`\n\n"
    if kept:
        head += f"The other parts are of {kept['at']}: `{kept['command']}`\n\n"
    out.with_suffix(".md").write_text(head + text + "\n")
    draw(results, out.with_suffix(".png"))


if __name__ == "__main__":
    main()
