"""A day of two scenarios in a few minutes, on the virtual clock: traffic that rises and falls, two
changes of content, an upgrade, three faults (S64).

python -m loadtests.sim.day --out loadtests/results/day-2026-11-21
"""

from __future__ import annotations

import argparse
import math
import random
import shlex
import sys
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Final

from loadtests.day.figure import (
    Action,
    Day,
    Point,
    clock,
)
from loadtests.sim.control import Control
from loadtests.sim.live import LiveMesh
from loadtests.sim.load import Lengths, merged, poisson
from loadtests.sim.ratio.loop import SHAPE
from pdmesh.core.groups.desired import UpgradeLimits
from pdmesh.core.model import Role
from pdmesh.core.moves.cron import Cron
from pdmesh.core.moves.schedule import Schedule, ScheduleAction, ScheduleEntry
from pdmesh.core.ratio.controller import RatioLimits

DAY_S: Final = 86_400.0
MIDNIGHT: Final = datetime(2026, 11, 21, tzinfo=UTC).timestamp()
_HOUR: Final = 3600.0
_LOAD_S: Final = 300.0  # how long an instance takes to set up, in seconds of the day
_PEAK_PER_S: Final = 7.0
_E2E_SLO_S: Final = 25.0
NEW_PROMPTS_AT: Final = 10.0 * _HOUR
NEW_OUTPUTS_AT: Final = 14.0 * _HOUR
UPGRADE_AT: Final = 20.0 * _HOUR
FAULTS: Final = (
    (8.75 * _HOUR, "chat-0", Role.DECODE),
    (12.5 * _HOUR, "code-0", Role.PREFILL),
    (16.25 * _HOUR, "chat-1", Role.PREFILL),
)


def chat_rate(hour: float) -> float:
    """Requests per second: few at night, peaks before noon and in the afternoon.

    The shape is that of P/D-Serve's figure 2a.
    """

    def hump(at: float, width: float) -> float:
        return math.exp(-(((hour - at) / width) ** 2))

    return _PEAK_PER_S * min(1.0, 0.12 + 0.85 * hump(11.0, 2.6) + 0.85 * hump(16.5, 2.8))


def chat_lengths(at_s: float) -> Lengths:
    """The lengths of prompts and answers.

    At 10:00, prompts become longer. At 14:00, prompts become short again, and answers become
    longer.
    """
    if at_s < NEW_PROMPTS_AT:
        return Lengths(1000, 100)
    return Lengths(1600, 100) if at_s < NEW_OUTPUTS_AT else Lengths(1000, 170)


def _entry(name: str, cron: str, what: ScheduleAction) -> ScheduleEntry:
    return ScheduleEntry(name, "chat", Cron.parse(cron), what, 1)


SCHEDULE: Final = (
    _entry("night-1", "5 0 * * *", ScheduleAction.LEND),
    _entry("night-2", "10 0 * * *", ScheduleAction.LEND),
    _entry("morning-1", "30 6 * * *", ScheduleAction.RECLAIM),
    _entry("morning-2", "0 8 * * *", ScheduleAction.RECLAIM),
    _entry("evening-1", "0 22 * * *", ScheduleAction.LEND),
    _entry("evening-2", "0 23 * * *", ScheduleAction.LEND),
)


def play(speed: float, seed: int, command: str) -> Day:
    """Simulate the day. All its durations are divided by `speed`, except how long requests take."""
    until = DAY_S / speed
    shape = replace(SHAPE, ttft_slo_s=15.0)
    slo = {"chat": _E2E_SLO_S, "code": _E2E_SLO_S}
    mesh = LiveMesh(shape, seed, load_s=_LOAD_S / speed, num_blank=2, e2e_slo_s=slo)
    for number in range(3):
        mesh.set_up(f"chat-{number}", "chat", 2, 3)
    mesh.set_up("code-0", "code", 2, 2)
    schedule = Schedule(SCHEDULE, lead_s=2 * _LOAD_S)
    window_s = max(10.0, 120.0 / speed)
    limits = RatioLimits(settle_s=2 * window_s, hold_s=15 * window_s)
    control = Control(mesh, window_s, until, limits, schedule, MIDNIGHT, speed=speed)
    control.upgrade_limits = UpgradeLimits(soak_s=3 * window_s)
    control.start()
    at = mesh.clock.at
    at(UPGRADE_AT / speed, partial(control.release, "chat", "r2"))
    for when, group_id, role in FAULTS:
        at(when / speed, partial(control.kill, group_id, role, _HOUR / speed))
    rng = random.Random(seed)
    chat = poisson(
        rng,
        until,
        _PEAK_PER_S,
        lambda t: chat_rate(t * speed / _HOUR),
        lambda t: chat_lengths(t * speed),
        "chat",
    )
    code = poisson(rng, until, 1.2, lambda _: 1.2, lambda _: Lengths(600, 60), "code")
    mesh.play(merged(chat, code))
    mesh.clock.run()
    return _document(control, speed, command)


def _document(control: Control, speed: float, command: str) -> Day:
    totals = control.mesh.totals
    day = Day(
        "simulated",
        command,
        speed,
        totals.num,
        totals.num_failed,
        totals.num_late,
        totals.num_migrated,
    )
    for sample in control.samples:
        window = sample.window
        day.points.append(
            Point(
                sample.at_s * speed,
                sample.scenario,
                sample.rate_per_s,
                window.answered_per_s if window else 0.0,
                window.e2e_s if window else None,
                window.prefill_share if window else None,
                window.success_share if window else None,
                dict(sample.groups),
            )
        )
    day.actions = [Action(e.at_s * speed, e.kind, e.scenario, e.text) for e in control.log]
    day.actions += [
        Action(NEW_PROMPTS_AT, "change", "chat", "prompts of 1,600 tokens instead of 1,000"),
        Action(
            NEW_OUTPUTS_AT,
            "change",
            "chat",
            "answers of 170 tokens instead of 100, prompts of 1,000",
        ),
    ]
    day.actions.sort(key=lambda a: a.at_s)
    return day


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--speed", type=float, default=6.0, help="seconds of the day per second")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="write OUT.json, OUT.md and OUT.png")
    options = parser.parse_args()
    command = shlex.join(["python", "-m", "loadtests.sim.day", *sys.argv[1:]])
    day = play(options.speed, options.seed, command)
    for action in day.actions:
        print(f"{clock(action.at_s)}  {action.kind:12} {action.scenario:6} {action.text}")
    print(
        f"simulated: {day.num_requests:,} requests, {day.num_failed} failed, {day.num_late} late, "
        f"{day.num_migrated} went on elsewhere"
    )
    if options.out:
        day.write(options.out)
    sys.exit(1 if day.num_failed else 0)


if __name__ == "__main__":
    main()
