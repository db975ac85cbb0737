"""Other serving stacks beside ours: each in turn, in the same minutes, asked by one generator in C.

    make bench-peers                            installs the peers first, into .cache/peers
    python -m loadtests.peers [--rounds 5] [--seconds 4] [--only NAME ...] [--out FILE]

A round starts each stack, sends each case to it and stops it. The next round takes the stacks in
the opposite order. A ratio compares two stacks of one round. If a stack cannot be installed or
ends, the record names it, and the others are still measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

from loadtests.harness.processes import ProcessSet, cpu_between
from loadtests.harness.progress import Progress
from loadtests.harness.results import write
from loadtests.peers.cases import CASES, PATH, WARM_UP, Case, Load, Turn
from loadtests.peers.install import Unavailable, compiled
from loadtests.peers.report import ABOUT, as_markdown
from loadtests.peers.stacks import STACKS, Serving, Stack

_WARM_UP_S: Final = 1.0
_GRACE_S: Final = 60.0  # a generator that takes so much longer than its window hangs


def order_of(stacks: Sequence[Stack], round_number: int) -> Sequence[Stack]:
    return stacks if round_number % 2 == 0 else stacks[::-1]


def ask(port: int, case: Case, seconds: float) -> Load:
    """Send one window of load. Raises Unavailable if the generator ends with an error."""
    with tempfile.NamedTemporaryFile("w", prefix="pdmesh-body-") as bodies:
        bodies.write(case.body + "\n")
        bodies.flush()
        command = [compiled("generator"), port, PATH, bodies.name, case.connections, seconds]
        try:
            done = subprocess.run(
                list(map(str, command)),
                capture_output=True,
                text=True,
                timeout=seconds + _GRACE_S,
                check=False,
            )
        except subprocess.TimeoutExpired as exc:
            raise Unavailable(f"{case.name}: the generator did not end") from exc
    if done.returncode:
        raise Unavailable(f"{case.name}: {done.stderr.strip()}")
    return Load(**json.loads(done.stdout))


def measured(stack: Stack, serving: Serving, seconds: float) -> list[Turn]:
    """Send each case after a warm-up. Raises Unavailable if the stack does not answer."""
    ask(serving.port, WARM_UP, _WARM_UP_S)
    turns = []
    for case in CASES:
        processes = ProcessSet(serving.pids)
        before = processes.costs()
        load = ask(serving.port, case, seconds)
        cpu = cpu_between(before, processes.costs())
        if not load.num_ok or len(cpu) < len(serving.pids):
            raise Unavailable(f"{case.name}: {load.num_ok} answers, {load.num_failed} failures")
        turns.append(Turn(stack.name, case.name, load, sum(cpu.values())))
    return turns


async def run(
    stacks: Sequence[Stack], rounds: int, seconds: float
) -> tuple[list[list[Turn]], dict[str, str]]:
    """The turns of each round, and for each missing stack the reason."""
    found: list[list[Turn]] = []
    missing: dict[str, str] = {}
    progress = Progress(rounds * len(stacks))
    for number in range(rounds):
        turns: list[Turn] = []
        for stack in order_of(stacks, number):
            progress.step(f"round {number + 1}: {stack.name}")
            if stack.name in missing:
                continue
            try:
                async with stack.serve() as serving:
                    turns += await asyncio.to_thread(measured, stack, serving, seconds)
            except Unavailable as exc:
                missing[stack.name] = str(exc)
        found.append(turns)
    progress.close()
    return found, missing


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each case")
    parser.add_argument("--only", nargs="+", choices=[stack.name for stack in STACKS])
    parser.add_argument("--out", type=Path, help="writes OUT.md and OUT.json")
    args = parser.parse_args()
    stacks = [stack for stack in STACKS if not args.only or stack.name in args.only]
    rounds, missing = asyncio.run(run(stacks, args.rounds, args.seconds))
    text = as_markdown(rounds, missing)
    print(text)
    if args.out:
        turns = [[asdict(turn) for turn in each] for each in rounds]
        title = "Other serving stacks beside ours"
        write(args.out, "loadtests.peers", title, ABOUT, text, rounds=turns, missing=missing)


if __name__ == "__main__":
    main()
