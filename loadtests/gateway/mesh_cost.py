"""The CPU of every process of a mesh per request, in this tree and in another revision.

Both meshes run all the time. Each has two gateways, a prefill and a decode on sim. Each round sends
the cases of `make bench-peers` to both meshes, in alternating order, so that other load on the
machine affects both alike. Other load changes CPU time less than throughput, but still a lot. A
busy neighbour on the same core halves the speed of both meshes. So only ratios within a round are
compared.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from loadtests.gateway.cost import Tree, checked_out, ratios, running
from loadtests.harness.generator import ROOT
from loadtests.harness.processes import ProcessSet, cpu_between
from loadtests.harness.results import Spread, write
from loadtests.peers.__main__ import ask
from loadtests.peers.cases import CASES, WARM_UP, Case

NUM_GATEWAYS: Final = 2
_WARM_UP_S: Final = 2.0
ABOUT: Final = (
    "Milliseconds of CPU per request, medians over the rounds; the last column is new / old of "
    "each round, with median (lowest..highest). Ratios are of meshes that run side by side."
)
# The kinds of processes of a mesh.
KINDS: Final = ("gateway", "prefill", "decode", "master", "nats", "rest")


@dataclass(frozen=True, slots=True)
class Window:
    """The result of one case on one mesh. `cpu_ms` is the CPU per request, by kind of process."""

    requests_per_s: float
    cpu_ms: Mapping[str, float]
    ttft_p50_ms: float

    @property
    def total_ms(self) -> float:
        return sum(self.cpu_ms.values())


def kind_of(process: str) -> str:
    return next((kind for kind in KINDS if process.startswith(kind)), "rest")


def window(tree: Tree, case: Case, seconds: float) -> Window:
    """Send one case to a mesh. Raises Unavailable if the mesh does not answer."""
    port = urlsplit(tree.url).port
    assert port is not None
    processes = ProcessSet(tree.all_pids)
    before = processes.costs()
    load = ask(port, case, seconds)
    cpu_ms = dict.fromkeys(KINDS, 0.0)
    for name, cpu_s in cpu_between(before, processes.costs()).items():
        cpu_ms[kind_of(name)] += 1e3 * cpu_s / max(1, load.num_ok)
    return Window(load.requests_per_s, cpu_ms, load.ttft_p50_ms)


Sides = dict[str, list[Window]]  # windows by case


def in_turn(
    meshes: tuple[Tree, Tree], cases: Sequence[Case], rounds: int, seconds: float
) -> tuple[Sides, Sides]:
    """The windows of two meshes that run at the same time, by case and round."""
    found: tuple[Sides, Sides] = ({c.name: [] for c in cases}, {c.name: [] for c in cases})
    for mesh in meshes:
        window(mesh, WARM_UP, _WARM_UP_S)
    order = list(zip(meshes, found, strict=True))
    for number in range(rounds):
        for case in cases:
            for mesh, sides in order if number % 2 == 0 else order[::-1]:
                sides[case.name].append(window(mesh, case, seconds))
        print(f"round {number + 1} of {rounds}", file=sys.stderr, flush=True)
    return found


def table(names: tuple[str, str, str], old: Sides, new: Sides) -> str:
    """A Markdown table. `names` has a name for the first mesh, the second mesh, and their ratio."""
    lines = [
        f"| case | CPU of | {names[0]}, ms | {names[1]}, ms | {names[2]} |",
        "|---|---|---|---|---|",
    ]
    for name, before in old.items():
        after = new[name]
        for kind in ("all", *KINDS):
            pair = [
                [w.total_ms if kind == "all" else w.cpu_ms[kind] for w in side]
                for side in (before, after)
            ]
            lines.append(_row(name, kind, *pair))
        rates = [[w.requests_per_s for w in side] for side in (before, after)]
        cells = [Spread.of(each).text(",.0f") for each in rates]
        told = ratios(*rates).text(".2f")
        lines.append(f"| {name} | *requests/s* | {cells[0]} | {cells[1]} | {told} |")
    return "\n".join(lines)


def _row(case: str, kind: str, before: Sequence[float], after: Sequence[float]) -> str:
    cells = [Spread.of(side).median for side in (before, after)]
    told = ratios(list(before), list(after)).text(".2f") if all(before) else ""
    return f"| {case} | {kind} | {cells[0]:.3f} | {cells[1]:.3f} | {told} |"


@contextlib.contextmanager
def both(
    revision: str, python: str, old_slots: int | None, slots: int | None, env: Mapping[str, str]
) -> Iterator[tuple[Tree, Tree]]:
    """A mesh of the revision, run by the interpreter `python`, and a mesh of this tree with the
    settings in `env`.
    """
    with (
        checked_out(revision) as tree,
        running(tree, num_gateways=NUM_GATEWAYS, python=python, prefill_slots=old_slots) as before,
        running(ROOT, env=env, num_gateways=NUM_GATEWAYS, prefill_slots=slots) as now,
    ):
        yield before, now


def main() -> None:
    parser = argparse.ArgumentParser(prog="make bench NAME=mesh-cost ARGS=", description=__doc__)
    parser.add_argument("--old", default="HEAD~1", help="the revision to compare this tree with")
    parser.add_argument("--old-python", default=sys.executable, help="the interpreter that runs it")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each case")
    parser.add_argument("--cases", type=int, default=len(CASES), help="the first so many")
    parser.add_argument("--only", choices=[case.name for case in CASES], help="one case alone")
    parser.add_argument("--prefill-slots", type=int, help="else so many that no prompt waits")
    parser.add_argument("--old-prefill-slots", type=int, help="of the old one, if they differ")
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="NAME=VALUE", help="environment of this tree alone"
    )
    parser.add_argument("--out", type=Path, help="writes OUT.md and OUT.json")
    options = parser.parse_args()
    cases = [case for case in CASES[: options.cases] if options.only in (None, case.name)]
    env = dict(each.split("=", 1) for each in options.set)
    slots = options.prefill_slots
    old_slots = slots if options.old_prefill_slots is None else options.old_prefill_slots
    with both(options.old, options.old_python, old_slots, slots, env) as meshes:
        old, new = in_turn(meshes, cases, options.rounds, options.seconds)
    text = table((options.old, "this tree", "new / old"), old, new)
    print(text)
    if options.out is not None:
        write(options.out, "loadtests.gateway.mesh_cost", "CPU of a mesh", ABOUT, text)


if __name__ == "__main__":
    main()
