"""Whether decisions, the index and the virtual clock carry a mesh of thousands of instances (`make
bench NAME=scale`).

python -m loadtests.placement.scale --rounds 3 --out loadtests/results/scale-2026-11-28
"""

from __future__ import annotations

import argparse
import statistics
import textwrap
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Final

from loadtests.harness.results import write
from loadtests.placement.scale.blocks import events, memory, snapshot
from loadtests.placement.scale.decisions import at_a_gateway, in_the_core, through_grpc
from loadtests.placement.scale.mesh import run as run_clock
from loadtests.placement.scale.view import held_by_a_gateway

Found = dict[str, list[float]]
_ABOUT: Final = (
    "In every round, each measurement takes turns with its baseline. A decision is compared "
    "with the same core without its shortlist. A decision through gRPC is compared with the "
    "same core in one process. A snapshot in steps is compared with the same snapshot at "
    "once. Events are compared with the index without messages. 'Again' means that a decision "
    "is repeated with the same random draws. The processor's caches then hold its instances."
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=textwrap.fill(_ABOUT, 100),
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--count", type=int, default=600, help="decisions of a cell in a round")
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--rate", type=float, default=100.0, help="requests/s on the virtual clock")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--out", type=Path, help="write OUT.json and OUT.md")
    options = parser.parse_args()
    found: Found = defaultdict(list)
    _in_a_child(found, memory, options.blocks)
    clocks = [
        run_clock(10_000, options.rate, options.requests, is_shortlisted=is_shortlisted)
        for is_shortlisted in (True, False)
    ]
    clock = [asdict(c) | {"virtual seconds per CPU second": c.factor} for c in clocks]
    for number in range(options.rounds):
        _in_a_child(found, in_the_core, options.count)
        _note(found, through_grpc(options.count))
        _in_a_child(found, at_a_gateway, options.count // 4)
        _in_a_child(found, held_by_a_gateway, options.requests)
        _note_hop(found)
        _in_a_child(found, snapshot, options.blocks)
        _in_a_child(found, events, options.blocks // 4)
        text = f"Rounds: {number + 1}.\n\n{_tables(found, clock)}"
        print(text, flush=True)
        if options.out:  # write after each round, since a run may be interrupted
            figures = {"found": found, "clock": clock}
            write(options.out, "loadtests.placement.scale", "Scale", _ABOUT, text, **figures)


def _tables(found: Found, clock: Sequence[dict[str, float]]) -> str:
    lines = ["| figure | median | lowest to highest |", "|---|---|---|"]
    lines += [
        f"| {name} | {statistics.median(v):,.3f} | {min(v):,.3f} to {max(v):,.3f} |"
        for name, v in found.items()
    ]
    lines += ["", "| virtual clock, 10,000 instances | shortlist | all scored |", "|---|---|---|"]
    lines += [f"| {name} | {clock[0][name]:,.3f} | {clock[1][name]:,.3f} |" for name in clock[0]]
    return "\n".join(lines)


def _note_hop(found: Found) -> None:
    """Compare the cost of asking the master with the cost of holding the master's view.

    A gateway that asks the master pays for its own requests: its part of the call and the master's
    part. A gateway that holds the view pays for the events of all requests, including those of
    other gateways. The master holds the view in both cases.
    """
    inside_ms = found["no gRPC, 750 + 500, as a replica in a gateway: CPU ms of a decision"][-1]
    held_ms = found["the mesh's events at a gateway: CPU ms of a request, without the bus"][-1]
    for how in ("4 gateways, 1 a message", "2 gateways, 16 a message"):
        asked = f"gRPC, 750 + 500, shortlist, {how}"
        asked_ms = sum(
            found[f"{asked}: {whose} CPU ms of a decision"][-1]
            for whose in ("master's", "gateways'")
        )
        found[f"{asked}: CPU ms of the hop"].append(asked_ms - inside_ms)
        found[f"{asked}: gateways whose views cost as much as their hops"].append(
            (asked_ms - inside_ms) / held_ms
        )


def _in_a_child(found: Found, measure: Callable[[int], dict[str, float]], size: int) -> None:
    with get_context("spawn").Pool(1) as pool:
        _note(found, pool.apply(measure, (size,)))


def _note(found: Found, figures: dict[str, float]) -> None:
    for name, value in figures.items():
        found[name].append(value)


if __name__ == "__main__":
    main()
