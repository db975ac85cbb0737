"""Measures the ratio loop on a simulated mesh: what it finds, how soon, and where it stops (S28,
S29, S32).

It also checks whether noise makes the loop move instances.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from loadtests.sim.control import Control, count, planned
from loadtests.sim.live import LiveMesh
from loadtests.sim.load import Lengths, poisson
from loadtests.sim.mesh import MeshShape
from loadtests.sim.ratio.sweep import DECODE_SLOTS, PREFILL_SLOTS, TOTAL, Workload
from pdmesh.core.ratio.throughput import Split
from pdmesh.engine.step_time_laws import SMOLLM2_CPU

WINDOW_S: Final = 10.0
CHANGE_AT_S: Final = 300.0
SHAPE: Final = MeshShape(
    SMOLLM2_CPU,
    prefill_slots=PREFILL_SLOTS,
    decode_slots=DECODE_SLOTS,
    num_blocks=1024,
    ttft_slo_s=10.0,
)
BALANCED: Final = Lengths(1000, 100)
LONG_ANSWERS: Final = Lengths(1000, 150)
LONG_PROMPTS: Final = Lengths(1500, 100)


def run(
    split: Split,
    rate_per_s: float,
    lengths_at: Callable[[float], Lengths],
    until: float,
    seed: int,
    *,
    has_ratio: bool = True,
) -> Control:
    """Run one group under Poisson arrivals, with the loop on or off."""
    mesh = LiveMesh(SHAPE, seed, load_s=30.0)
    mesh.set_up("chat-0", "chat", split.num_prefill, split.num_decode)
    control = Control(mesh, WINDOW_S, until, has_ratio=has_ratio)
    control.start()
    rng = random.Random(seed)
    mesh.play(poisson(rng, until, rate_per_s, lambda _: rate_per_s, lengths_at, "chat"))
    mesh.clock.run()
    return control


@dataclass(frozen=True, slots=True)
class Change:
    """The loop's reaction to a workload that changes at 300 s.

    `num_windows` is how many windows pass until the loop plans. `wanted` is the ratio that it
    plans.
    """

    what: str
    seed: int
    num_windows: int | None
    wanted: str
    num_moves: int
    num_failed: int
    num_requests: int


def change(what: str, seed: int) -> Change:
    """Simulate one of the paper's two changes: answers of 1.5 times the length, or longer
    prompts.
    """
    after = LONG_ANSWERS if what == "outputs +50 %" else LONG_PROMPTS
    split = Split(4, 4) if what == "outputs +50 %" else Split(3, 5)
    control = run(split, 5.2, lambda t: BALANCED if t < CHANGE_AT_S else after, 1500.0, seed)
    found = planned(control.log)
    totals = control.mesh.totals
    windows = int((found[0].at_s - CHANGE_AT_S) / WINDOW_S) if found else None
    wanted = found[0].text.split(":")[1].strip() if found else ""
    moves = count(control.log, "move")
    return Change(what, seed, windows, wanted, moves, totals.num_failed, totals.num)


@dataclass(frozen=True, slots=True)
class Calm:
    """The result of an hour of one workload at 60 % of the split's capacity.

    In this hour, the loop should do nothing.
    """

    seed: int
    num_windows: int
    num_planned: int
    num_requests: int


def calm(seed: int) -> Calm:
    control = run(Split(3, 5), 4.6, lambda _: BALANCED, 3600.0, seed)
    return Calm(seed, len(control.samples), len(planned(control.log)), control.mesh.totals.num)


@dataclass(frozen=True, slots=True)
class Convergence:
    """The result of a run in which the loop starts from a wrong split, without a profile.

    `distance` is how many role changes the final split is from the formula's best.
    """

    start: str
    seed: int
    end: str
    best: str
    num_moves: int
    num_undone: int
    distance: int
    last_move_s: float


def converge(start: Split, seed: int) -> Convergence:
    """Run an hour at 85 % of the load that the formula's best split carries."""
    workload = Workload("balanced", BALANCED)
    best = workload.profile().best_split(TOTAL, least=2)
    rate = 0.85 * workload.profile().phi(best).value * TOTAL
    control = run(start, rate, lambda _: BALANCED, 3600.0, seed)
    group = control.mesh.states()["chat-0"]
    end = Split(group.num_prefill, group.num_decode)
    moves = [e for e in control.log if e.kind == "move"]
    return Convergence(
        str(start),
        seed,
        str(end),
        str(best),
        len(moves),
        count(control.log, "decided", "undone"),
        abs(end.num_prefill - best.num_prefill),
        moves[-1].at_s if moves else 0.0,
    )
