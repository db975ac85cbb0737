"""A day of a scenario in five minutes, on a mesh of real processes (S64).

Traffic rises and falls, its content changes twice, and there are an upgrade and three faults.

    python -m loadtests.day --out loadtests/results/day-DATE

At first, blank sim instances (instances without a role) become three groups of one prefill and two
decodes. Their engines take the time that SmolLM2 takes on a CPU. One group is lent to training at
night. Later, prompts become longer, then answers. Each change must move the ratio of prefills to
decodes. All groups get a new release. A prefill and a decode are killed, and a device fails.
Clients send at times that do not depend on the answers. The record names each expected event that
did not happen. If there is such an event, the exit code is 1. `loadtests.sim.day` plays a longer
day on a virtual clock.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import shlex
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from loadtests.day import plan as day_plan
from loadtests.day.figure import Day, clock
from loadtests.day.plan import (
    LENGTH_S,
    SCENARIO,
    SPEED,
    WINDOW_S,
)
from loadtests.day.watch import Watch
from loadtests.traffic.loops import Answer, Target, open_loop
from loadtests.traffic.workloads import Arrival
from pdmesh.atomic_file import write_atomically
from pdmesh.launcher.mesh import Mesh
from pdmesh.launcher.spec import MeshSpec
from pdmesh.net.nats.bus import NatsBus
from pdmesh.v1.common_pb2 import ROLE_DECODE, ROLE_PREFILL
from tests.support.sites.operator import Operator

_LOOK_S: Final = 1.0
_SETUP_S: Final = 120.0
_END_S: Final = 45.0  # the longest time that the run waits at its end
_MAX_LAG_S: Final = 0.25  # the record has a remark if a request was sent later than this


class DayOnMesh:
    """The run of one day. The day begins at `start`, in unix seconds."""

    def __init__(
        self, mesh: Mesh, operator: Operator, watch: Watch, start: float, arrivals: list[Arrival]
    ) -> None:
        self._mesh, self._operator, self._watch, self._start = mesh, operator, watch, start
        self._arrivals = arrivals
        self._victims: list[str] = []
        self._is_whole = False
        self.answers: list[Answer] = []

    async def run(self) -> Day:
        await asyncio.sleep(max(0.0, self._start - time.time()))
        self._watch.begin()
        looking = asyncio.create_task(self._look())
        acting = [asyncio.create_task(self._at(at_s, act)) for at_s, act in self._acts()]
        target = Target.at(self._mesh.http_url, names_scenario=True)
        self.answers = await open_loop(target, self._arrivals, lambda answer: None)
        await asyncio.gather(*acting)
        await self._until_quiet()
        looking.cancel()
        return self._day()

    def _acts(self) -> list[tuple[float, Callable[[], Awaitable[None]]]]:
        return [
            (day_plan.KILL_PREFILL_AT, lambda: self._kill(ROLE_PREFILL)),
            (day_plan.NEW_PROMPTS_AT, lambda: self._say("prompts of 900 tokens instead of 300")),
            (day_plan.KILL_DECODE_AT, lambda: self._kill(ROLE_DECODE)),
            (
                day_plan.NEW_OUTPUTS_AT,
                lambda: self._say("answers of 70 tokens instead of 20, prompts of 300 again"),
            ),
            (day_plan.DEVICE_FAULT_AT, self._break_device),
            (day_plan.UPGRADE_AT, self._release),
        ]

    async def _at(self, at_s: float, act: Callable[[], Awaitable[None]]) -> None:
        await asyncio.sleep(max(0.0, self._watch.began + at_s - time.monotonic()))
        await act()

    async def _say(self, text: str) -> None:
        self._watch.act("change", text)

    async def _kill(self, role: int) -> None:
        victim = (await self._operator.members(role))[0]
        self._victims.append(victim)
        self._watch.act("fault", f"SIGKILL to {victim}")
        self._mesh.kill(victim)

    async def _break_device(self) -> None:
        victim = (await self._operator.members(ROLE_DECODE))[-1]
        self._victims.append(victim)
        self._watch.act("fault", f"the device of {victim} has to be reset (level 3)")
        file = self._mesh.state_dir / "devices" / f"{victim}.json"
        file.parent.mkdir(exist_ok=True)
        write_atomically(file, '{"level": 3, "reason": "DEVICE_RESET_REQUIRED"}')

    async def _release(self) -> None:
        await self._operator.apply(day_plan.groups(self._start, "2"))

    async def _look(self) -> None:
        """Read the groups' state every second, and add a point at the end of each window."""
        for number in itertools.count(1):
            await asyncio.sleep(max(0.0, self._watch.began + number * _LOOK_S - time.monotonic()))
            states = await self._operator.groups()
            self._watch.look(states)
            if number % (WINDOW_S / _LOOK_S) == 0:
                since = number * _LOOK_S - WINDOW_S
                num_asked = sum(since <= a.at_s < since + WINDOW_S for a in self._arrivals)
                self._watch.close_window(states, num_asked)

    async def _until_quiet(self) -> None:
        """Wait until no upgrade is under way and all groups serve, except lent groups. Waits for at
        most `_END_S`.
        """
        deadline = time.monotonic() + _END_S
        while time.monotonic() < deadline:
            states = await self._operator.groups()
            are_serving = all(group.state == "serving" for group in states.groups)
            self._is_whole = are_serving and all(u.state == "went back" for u in states.upgrades)
            if self._is_whole:
                return
            await asyncio.sleep(_LOOK_S)

    def _day(self) -> Day:
        answered = [a for a in self.answers if a.is_answered]
        num_failed = len(self.answers) - len(answered)
        return Day(
            f"on a mesh of {len(self._mesh.names)} processes (sim engine, times of SmolLM2 on a "
            "CPU)",
            shlex.join(["python", "-m", "loadtests.day", *sys.argv[1:]]),
            SPEED,
            len(self.answers),
            num_failed,
            sum(a.e2e_s > day_plan.E2E_SLO_S for a in answered),
            self._watch.num_migrated,
            missed=list(self._missed(num_failed)),
            points=self._watch.points,
            actions=sorted(self._watch.actions, key=lambda a: a.at_s),
        )

    def _missed(self, num_failed: int) -> Iterator[str]:
        watch = self._watch
        statuses = sorted({a.status for a in self.answers if not a.is_answered})
        steps = ", ".join(watch.upgraded) or "none"
        alone = [v for v in self._victims if v not in watch.replaced | watch.ejected]
        late = [a.lag_s for a in self.answers if a.lag_s > _MAX_LAG_S]
        came_about = {
            (
                f"every request answered: {num_failed} were not (HTTP {statuses}, 0: cut or no "
                "answer)"
            ): not num_failed,
            "a group lent at the beginning and at the end of the day": watch.num_lent >= 2,
            "a lent group back in the morning": watch.num_back > 0,
            "more prefills for longer prompts": any(p > 0 for p, _ in watch.moves),
            "more decodes for longer answers": any(d > 0 for _, d in watch.moves),
            f"the upgrade (its steps: {steps})": "done" in watch.upgraded,
            f"a substitute for {', '.join(alone)}": not alone,
            "all groups whole at the end": self._is_whole,
            (
                f"an open loop: {len(late)} requests left up to {max(late, default=0):.1f} s "
                "late, because the machine lacked CPU"
            ): not late,
        }
        return (what for what, is_so in came_about.items() if not is_so)


@asynccontextmanager
async def started(seed: int) -> AsyncIterator[DayOnMesh]:
    with tempfile.TemporaryDirectory(prefix="pdmesh-day-") as directory:
        spec = MeshSpec(
            engine="sim",
            num_prefill=0,
            num_decode=0,
            num_blank=day_plan.NUM_INSTANCES,
            node_agent=True,
            http_port=0,
            grpc_port=0,
            env={
                "PDMESH_LOG_LEVEL": "warning",
                "PDMESH_MASTER_SCHEDULER_RATIO_WINDOW_S": str(WINDOW_S),
            },
        )
        async with Mesh(spec, Path(directory) / "mesh", report=_say) as mesh:
            bus = await NatsBus.connect(mesh.nats_url, "day")
            watch = Watch()
            await watch.listen(bus)
            operator = Operator(bus, mesh_token=mesh.token)
            start = day_plan.next_start(time.time() + 10)
            await operator.apply(day_plan.groups(start, "1"))
            await _until_serving(operator)
            yield DayOnMesh(mesh, operator, watch, start, list(day_plan.arrivals(seed)))
            await bus.close()


async def _until_serving(operator: Operator) -> None:
    deadline = time.monotonic() + _SETUP_S
    while [g.state for g in (await operator.groups()).groups] != ["serving"] * 3:
        if time.monotonic() > deadline:
            raise TimeoutError(f"the groups do not serve: {await operator.groups()}")
        await asyncio.sleep(0.2)


def _say(line: str) -> None:
    print(line, file=sys.stderr)


async def _play(seed: int) -> Day:
    async with started(seed) as day:
        return await day.run()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="write OUT.json, OUT.md and OUT.png")
    options = parser.parse_args()
    _say(f"the day takes {LENGTH_S / 60:g} minutes, after a start of up to two")
    day = asyncio.run(_play(options.seed))
    for action in day.actions:
        print(f"{clock(action.at_s)}  {action.kind:12} {action.text}")
    print(f"{SCENARIO}: {day.num_requests} requests, {day.num_failed} failed, {day.num_late} late")
    for each in day.missed:
        print(f"did not happen: {each}")
    if options.out:
        day.write(options.out)
    sys.exit(1 if day.missed else 0)


if __name__ == "__main__":
    main()
