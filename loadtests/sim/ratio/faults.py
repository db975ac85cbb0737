"""A week of 10,000 devices at the paper's rate of faults, 1 to 2 per week and 400 devices (S38).

Requests are simulated where a fault is: one group for some minutes around each, with the request core's own migration and a
blank instance that stands in. All other group-minutes of the week are those of a group without a fault, simulated as often; the
share of success is of both, weighted by time.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

from loadtests.sim.control import Control, count
from loadtests.sim.live import LiveMesh
from loadtests.sim.load import poisson
from loadtests.sim.ratio.loop import BALANCED, SHAPE
from pdmesh.core.fleet import Role

NUM_DEVICES: Final = 10_000
DEVICES_PER_INSTANCE: Final = 8
FAULTS_PER_WEEK_AND_400: Final = 1.5
WEEK_S: Final = 7 * 86_400.0
SPLIT: Final = (3, 5)
RATE_PER_S: Final = 4.6
E2E_SLO_S: Final = 20.0
AROUND_S: Final = 900.0  # simulated for each fault
_FAULT_AT_S: Final = 120.0
LOAD_S: Final = 300.0  # a model of hundreds of billions of parameters loads within minutes


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: requests around it, how many failed, came late or went on elsewhere."""

    seed: int
    role: str
    num_requests: int
    num_failed: int
    num_late: int
    stood_in_after_s: float | None


def num_faults() -> int:
    return round(FAULTS_PER_WEEK_AND_400 * NUM_DEVICES / 400)


def play(seed: int, *, has_fault: bool) -> Fault:
    """A group of 3:5 at 60 % of what it can, and one that dies in it; its role by chance, as the devices are spread."""
    rng = random.Random(seed)
    role = rng.choices([Role.PREFILL, Role.DECODE], weights=SPLIT)[0]
    mesh = LiveMesh(SHAPE, seed, load_s=LOAD_S, num_blank=1, e2e_slo_s={"chat": E2E_SLO_S})
    mesh.set_up("chat-0", "chat", *SPLIT)
    control = Control(mesh, 10.0, AROUND_S, has_ratio=False)
    control.start()
    if has_fault:
        at = _FAULT_AT_S + rng.uniform(0, 10)
        mesh.clock.at(at, lambda: control.kill("chat-0", role, repaired_after_s=AROUND_S))
    mesh.play(poisson(rng, AROUND_S, RATE_PER_S, lambda _: RATE_PER_S, lambda _: BALANCED, "chat"))
    mesh.clock.run()
    totals = mesh.totals
    stood_in = [e.at_s for e in control.log if e.kind == "substituted"]
    died = [e.at_s for e in control.log if e.kind == "fault"]
    assert count(control.log, "fault") == has_fault
    return Fault(
        seed,
        role.value if has_fault else "",
        totals.num,
        totals.num_failed,
        totals.num_late,
        stood_in[0] - died[0] if stood_in else None,
    )


@dataclass(frozen=True, slots=True)
class Week:
    """Shares of requests answered at all and in time, over the week; `in_fault_windows`: in the minutes around faults alone."""

    num_instances: int
    num_groups: int
    num_faults: int
    answered: float
    in_time: float
    in_time_in_fault_windows: float
    in_time_without: float
    num_simulated: int


def week(faults: list[Fault], quiet: list[Fault]) -> Week:
    num_instances = NUM_DEVICES // DEVICES_PER_INSTANCE
    num_groups = num_instances // sum(SPLIT)
    share = len(faults) * AROUND_S / (num_groups * WEEK_S)  # of group-time that is near a fault

    def mean(of: list[Fault], failed_only: bool) -> float:
        bad = sum(f.num_failed + (0 if failed_only else f.num_late) for f in of)
        return 1 - bad / sum(f.num_requests for f in of)

    return Week(
        num_instances,
        num_groups,
        len(faults),
        share * mean(faults, True) + (1 - share) * mean(quiet, True),
        share * mean(faults, False) + (1 - share) * mean(quiet, False),
        mean(faults, False),
        mean(quiet, False),
        sum(f.num_requests for f in (*faults, *quiet)),
    )
