"""Plans of deployments checked against the virtual mesh: one table of errors (`make bench
NAME=sizing`).

    # Everything: some five minutes on two quiet cores.
    python -m loadtests.sizing --out loadtests/results/sizing-2026-11-28
    # Some scenes.
    python -m loadtests.sizing --only agents,reasoning
    # The rest of an interrupted run.
    python -m loadtests.sizing --kept FILE.json --out FILE

A plan says how many instances a workload needs, with prefill and decode apart (P/D) or together
(fusion). The virtual mesh is a simulation with the product's cores. For each scene, both kinds are
planned under light and heavy load and then simulated with the same laws. The check compares the
times that requests see, the highest load that keeps the goals, and whether one instance less would
suffice. A role may have a single instance here, since no plan includes a spare.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from pydantic import TypeAdapter

from loadtests.harness.progress import Progress
from loadtests.harness.results import describe_machine, describe_versions
from loadtests.sizing import report
from loadtests.sizing.check import Checked, check
from loadtests.sizing.scenes import SCENES, Scene


def _checked(job: tuple[Scene, float, int]) -> Checked:
    return check(*job)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", default=",".join(scene.name for scene in SCENES))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--kept", type=Path, help="take finished scenes from this FILE.json")
    parser.add_argument("--out", type=Path, help="write OUT.json and OUT.md")
    options = parser.parse_args()
    names = options.only.split(",")
    if unknown := set(names) - {scene.name for scene in SCENES}:
        parser.error(f"there is no scene {', '.join(sorted(unknown))}")
    kept = json.loads(options.kept.read_text())["results"] if options.kept else []
    found = TypeAdapter(list[Checked]).validate_python(kept)
    done = {(each.scene, each.rate_per_s) for each in found}
    jobs = [
        (scene, rate, options.seed)
        for scene in SCENES
        if scene.name in names
        for rate in scene.rates
        if (scene.name, rate) not in done
    ]
    progress = Progress(len(jobs) + 1)
    with ProcessPoolExecutor(options.processes) as pool:
        for checked in pool.map(_checked, jobs):
            progress.step(f"{checked.scene}, {checked.rate_per_s:g}/s")
            found.append(checked)
            if options.out:  # keep the results so far if the rest is interrupted
                _write(options.out, found)
    progress.close()
    if options.out:
        _write(options.out, found)
    print(report.markdown(found))


def _write(out: Path, found: list[Checked]) -> None:
    command = shlex.join(["python", "-m", "loadtests.sizing", *sys.argv[1:]])
    data = {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "machine": describe_machine(),
        "versions": describe_versions(),
        "results": [asdict(each) for each in found],
    }
    out.with_suffix(".json").write_text(json.dumps(data, indent=1) + "\n")
    head = f"# Plans of deployments, against the virtual mesh, {data['at']}\n\n`{command}`\n\n"
    out.with_suffix(".md").write_text(head + report.markdown(found) + "\n")


if __name__ == "__main__":
    main()
