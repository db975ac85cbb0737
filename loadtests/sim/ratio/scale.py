"""Measures what the control plane's decisions cost with 10,000 instances (S66).

The costs are real CPU time of the product's cores. Only the mesh is simulated.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from pdmesh.core.groups.membership_changes import GroupTracker
from pdmesh.core.model import Role
from pdmesh.core.moves.cron import Cron
from pdmesh.core.moves.move import GroupShape
from pdmesh.core.moves.next_move import GroupsSeen, PlanRunner
from pdmesh.core.moves.schedule import Schedule, ScheduleAction, ScheduleEntry
from pdmesh.core.placement.fleet import Fleet, InstanceRecorded, LoadReported
from pdmesh.core.placement.instance import Identity
from pdmesh.core.placement.plan import Placement
from pdmesh.core.placement.policies import Query
from pdmesh.core.ratio.bottleneck import Window
from pdmesh.core.ratio.controller import RatioController, WindowSeen

NUM_SCENARIOS: Final = 100
_SPLIT: Final = (4, 6)
_REPEATS: Final = 5


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU seconds of one round over all instances, or of one decision.

    The best of several measurements counts, since the machine is shared.
    """

    what: str
    num_instances: int
    seconds: float
    per_s: float  # how often it happens in the mesh; seconds * per_s is a share of one core


def costs(num_instances: int) -> list[Cost]:
    num_groups = num_instances // sum(_SPLIT)
    ids = [f"s{i % NUM_SCENARIOS}-{i // NUM_SCENARIOS}" for i in range(num_groups)]
    states = {i: GroupShape(i, i.split("-")[0], *_SPLIT, 0.5, 0.5, "", "m") for i in ids}
    fleet = _fleet(ids)
    return [
        Cost("ratio: a window of every scenario", num_instances, _ratio(states), 0.1),
        Cost("plans: one look at all groups", num_instances, _runner(states), 1.0),
        Cost("schedules: a tick, two entries per scenario", num_instances, _schedule(states), 1.0),
        Cost("groups: who changed", num_instances, _groups(fleet), 1.0),
        Cost("a load report", num_instances, _reports(fleet), num_instances / 1.0),
        Cost("a placement", num_instances, _placements(fleet), 2000.0),
    ]


def _timed(work: Callable[[], object], number: int = 1) -> float:
    best = float("inf")
    for _ in range(_REPEATS):
        began = time.process_time()
        for _ in range(number):
            work()
        best = min(best, (time.process_time() - began) / number)
    return best


def _fleet(group_ids: list[str]) -> Fleet:
    fleet = Fleet()
    for group_id in group_ids:
        roles = [Role.PREFILL] * _SPLIT[0] + [Role.DECODE] * _SPLIT[1]
        for number, role in enumerate(roles):
            scenario = group_id.split("-")[0]
            identity = Identity(
                f"{group_id}-{number}", 1, role, group_id, scenario, "m", "f", 64, 8, 16384, 0
            )
            fleet.handle(InstanceRecorded(identity), 0.0)
    return fleet


def _ratio(states: dict[str, GroupShape]) -> float:
    controller = RatioController()
    scenarios = sorted({s.scenario for s in states.values()})
    by_scenario = {n: {i: s for i, s in states.items() if s.scenario == n} for n in scenarios}
    rng = random.Random(1)
    now = 0.0

    def look() -> None:
        nonlocal now
        now += 10.0
        for name in scenarios:
            window = Window(500, 0.0, 0.5 * rng.gauss(1, 0.02), 2.0, 1.0, 0.5, 0.5, 50.0)
            controller.handle(WindowSeen(name, window, by_scenario[name], 10, 50.0), now)

    return _timed(look, 10)


def _runner(states: dict[str, GroupShape]) -> float:
    runner = PlanRunner()
    return _timed(lambda: runner.handle(GroupsSeen(states, 10), 0.0), 10)


def _schedule(states: dict[str, GroupShape]) -> float:
    entries = [
        ScheduleEntry(f"{what.value}-{n}", f"s{n}", Cron.parse(cron), what, 1)
        for n in range(NUM_SCENARIOS)
        for what, cron in (
            (ScheduleAction.LEND, "0 22 * * *"),
            (ScheduleAction.RECLAIM, "0 7 * * *"),
        )
    ]
    schedule = Schedule(entries)
    now = 1_795_219_200.0

    def tick() -> None:
        nonlocal now
        now += 1.0
        schedule.tick(states, now)

    return _timed(tick, 10)


def _groups(fleet: Fleet) -> float:
    tracker = GroupTracker()
    return _timed(lambda: tracker.observe(fleet.instances.values()))


def _reports(fleet: Fleet) -> float:
    ids = list(fleet.instances)
    rng = random.Random(1)

    def report() -> None:
        fleet.handle(LoadReported(rng.choice(ids), 1, 8, rng.randrange(8), 9000, False), 1.0)

    return _timed(report, 2000)


def _placements(fleet: Fleet) -> float:
    placement = Placement(fleet, random.Random(1))
    rng = random.Random(2)
    now = 1.0

    def plan() -> None:
        nonlocal now
        now += 0.0005
        query = Query("m", f"s{rng.randrange(NUM_SCENARIOS)}", (), 1000, 100)
        placement.plan(query, {}, now)

    return _timed(plan, 500)
