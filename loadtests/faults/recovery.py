"""How a mesh replaces an instance, step by step: killed, frozen, or with a device fault of each
level (S33-S36).

    python -m loadtests.faults.recovery --out loadtests/results/recovery-DATE

The mesh has real processes. Blank sim instances become two prefills and two decodes, as its desired
state says, and clients stream all the time. Then a fault hits one prefill or decode. The times of
the steps come from the mesh's own events: the fault is noticed and judged, the instance is taken
out, a blank instance is assigned, has loaded, is connected, serves, and has done its first request.
The texts that clients get during the repair are compared with the answers of a single sim model.
The next fault waits until the mesh is complete again.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

from loadtests.faults.recovery_log import STEPS, EventLog, watching
from loadtests.harness import results
from pdmesh.atomic_file import write_atomically
from pdmesh.core.health.fault_levels import (
    EJECTS_FROM,
    RESPONSES,
    FaultAction,
    Level,
)
from pdmesh.errors import InvalidRequest
from pdmesh.launcher.mesh import Mesh
from pdmesh.launcher.spec import MeshSpec
from pdmesh.net.nats.bus import NatsBus
from pdmesh.v1.common_pb2 import INSTANCE_PHASE_READY, ROLE_DECODE, ROLE_PREFILL
from tests.support.attack.steady_clients import Clients
from tests.support.sites.fleet import Reference
from tests.support.sites.operator import Operator

ROLES: Final = {"prefill": ROLE_PREFILL, "decode": ROLE_DECODE}
_GROUPS: Final = "groups:\n  chat: {prefill: 2, decode: 2}\n"
_NUM_BLANK: Final = 8
_MIN_SPARE: Final = 2
_REPAIR_S: Final = 40.0
_QUIET_S: Final = 3.0  # how long to wait for steps after a fault that should cause none
_POLL_S: Final = 0.05
ABOUT: Final = """\
Sim engine, 2P:2D of eight instances that began blank, on one machine; six clients stream all the
time. Each cell is the time in seconds from the fault to the event that reports the step: median
(lowest..highest).
`noticed`: the first report, from a lease, a heartbeat, the node agent (which asks its devices every
2 s) or the health-monitor. `judged`: dead, replaced by its own restart, or faulty at a level.
`taken out`: the group counts without it. `first request`: the end of the first request that the
substitute took part in. A fault of level 1 is only reported. At level 2 the instance restarts
itself and a spare takes its place meanwhile. From level 3 on, the leader ejects it: in order at
levels 3 and 4, at once at level 5. The health-monitor is restarted between device faults, since it
ejects at most one instance of a role per minute.
**errors**: requests that ended without their whole text. **wrong**: requests whose text differs
from that of a single sim model. **gap**: the longest silence that any client saw. SIGSTOP: a frozen
process is noticed by its lease."""


@dataclass(frozen=True, slots=True)
class Case:
    """A fault to cause. With `level` 0, `fault` hits the process; otherwise a device has a fault of
    this level.
    """

    fault: str
    role: str
    level: int = 0

    @property
    def is_repaired(self) -> bool:
        return not self.level or self.level >= EJECTS_FROM

    @property
    def name(self) -> str:
        if not self.level:
            return self.fault
        return f"device L{self.level} ({RESPONSES[Level(self.level)].action.value})"


@dataclass(slots=True)
class Repair:
    """One fault, and the seconds from it to each step of its repair.

    `gap_s` is the longest silence that a client saw during the repair.
    """

    fault: str
    role: str
    steps: dict[str, float]
    num_requests: int = 0
    num_errors: int = 0
    num_wrong: int = 0
    gap_s: float = 0.0

    def step(self, name: str) -> float:
        return self.steps.get(name, float("nan"))


def cases() -> list[Case]:
    """All cases, alternating between prefill and decode."""
    processes = [Case(fault, role) for fault in ("SIGKILL", "SIGSTOP") for role in ROLES]
    levels = [level for level in Level if RESPONSES[level].action is not FaultAction.IGNORE]
    return [*processes, *(Case("device", role, int(level)) for level in levels for role in ROLES)]


class Bench:
    def __init__(
        self, mesh: Mesh, log: EventLog, operator: Operator, clients: Clients, reference: Reference
    ) -> None:
        self._mesh, self._log, self._operator = mesh, log, operator
        self._clients, self._reference = clients, reference

    async def run(self, case: Case) -> Repair:
        victim = (await self._operator.members(ROLES[case.role]))[0]
        self._clients.take()
        began = time.monotonic()
        frozen = self._hit(case, victim)
        try:
            steps = await self._follow(case, began, victim)
        finally:
            await self._mend(case, victim, frozen)
        await self.until_whole()
        return self._judge(Repair(case.name, case.role, steps), began)

    def _hit(self, case: Case, victim: str) -> int:
        """Cause the fault. Returns the pid of a process that is left frozen, or 0."""
        if case.level:
            self._device(victim).parent.mkdir(exist_ok=True)
            write_atomically(
                self._device(victim), f'{{"level": {case.level}, "reason": "DEVICE_FAULT"}}'
            )
            return 0
        pid = self._mesh.pid(victim)
        self._mesh.kill(victim, signal.Signals[case.fault])
        return pid if case.fault == "SIGSTOP" else 0

    async def _follow(self, case: Case, began: float, victim: str) -> dict[str, float]:
        """Wait until the substitute has served, or until no further step is expected."""
        last = STEPS[-1] if case.is_repaired else "judged"
        while last not in (steps := self._log.timeline(began, victim)):
            if time.monotonic() - began > _REPAIR_S:
                raise TimeoutError(f"{case.name} at {victim}: only {steps} within {_REPAIR_S} s")
            await asyncio.sleep(_POLL_S)
        if not case.is_repaired:
            await asyncio.sleep(_QUIET_S)
        return self._log.timeline(began, victim)

    async def _mend(self, case: Case, victim: str, frozen: int) -> None:
        if frozen:
            with suppress(ProcessLookupError):  # the launcher may have ended the process already
                os.kill(frozen, signal.SIGKILL)
        if not case.level:
            return
        self._device(victim).unlink()
        if case.is_repaired:
            await self._mesh.restart("health-monitor")

    def _device(self, instance_id: str) -> Path:
        return self._mesh.state_dir / "devices" / f"{instance_id}.json"

    async def until_whole(self) -> None:
        """Wait until the group is complete, no instance leaves or is out of service, and there are
        enough blank instances for the next fault.
        """
        deadline = time.monotonic() + _REPAIR_S
        while not await self._is_whole():
            if time.monotonic() > deadline:
                raise TimeoutError(f"not whole again: {await self._operator.groups()}")
            await asyncio.sleep(4 * _POLL_S)

    async def _is_whole(self) -> bool:
        states = await self._operator.groups()
        # Repeat the order to uncordon. An earlier order may have come before the mesh saw that the
        # device is well again.
        for entry in states.out_of_service:
            with suppress(InvalidRequest):
                await self._operator.uncordon(entry.instance_id)
        members = [m for group in states.groups for m in group.members]
        return (
            [group.state for group in states.groups] == ["serving"]
            and len(members) == 4
            and all(m.phase == INSTANCE_PHASE_READY for m in members)
            and len(states.blank_instance_ids) >= _MIN_SPARE
            and not states.out_of_service
        )

    def _judge(self, repair: Repair, began: float) -> Repair:
        for each in self._clients.take():
            repair.num_requests += 1
            outcome = each.outcome
            if outcome is None or not outcome.is_complete:
                repair.num_errors += 1
            elif outcome.text != self._reference.text(list(each.prompt), each.max_tokens):
                repair.num_wrong += 1
            if outcome is not None:
                marks = [outcome.started_at, *outcome.arrivals, outcome.ended_at]
                since = [max(began, mark) for mark in marks]
                gaps = [later - earlier for earlier, later in pairwise(since)]
                repair.gap_s = max(repair.gap_s, *gaps)
        return repair


@asynccontextmanager
async def bench() -> AsyncIterator[Bench]:
    """A mesh that serves, with clients that stream."""
    async with AsyncExitStack() as stack:
        directory = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="pdmesh-recovery-"))
        )
        groups_file = directory / "groups.yaml"
        groups_file.write_text(_GROUPS)
        spec = MeshSpec(
            engine="sim",
            num_prefill=0,
            num_decode=0,
            num_blank=_NUM_BLANK,
            node_agent=True,
            groups_file=groups_file,
            http_port=0,
            grpc_port=0,
            env={"PDMESH_INSTANCE_NUM_SLOTS": "16", "PDMESH_LOG_LEVEL": "warning"},
        )
        mesh = await stack.enter_async_context(Mesh(spec, directory / "mesh", report=_say))
        bus = await NatsBus.connect(mesh.nats_url, "recovery")
        stack.push_async_callback(bus.close)
        log = await stack.enter_async_context(watching(bus))
        reference = Reference.load(directory / "reference")
        clients = await stack.enter_async_context(Clients(mesh.http_url, seed=1))
        running = Bench(mesh, log, Operator(bus, mesh_token=mesh.token), clients, reference)
        await running.until_whole()
        yield running


async def measure(chosen: Sequence[Case], num_repeats: int) -> list[Repair]:
    repairs: list[Repair] = []
    async with bench() as running:
        for _ in range(num_repeats):
            for case in chosen:
                repair = await running.run(case)
                repairs.append(repair)
                steps = ", ".join(f"{name} {at:.2f}" for name, at in repair.steps.items())
                _say(f"{case.name} {case.role}: {steps}; {repair.num_errors} errors")
    return repairs


def table(repairs: Sequence[Repair]) -> str:
    rows = []
    for fault, role in dict.fromkeys((r.fault, r.role) for r in repairs):
        own = [r for r in repairs if (r.fault, r.role) == (fault, role)]
        cells = [fault, role, *(_cell([r.step(name) for r in own]) for name in STEPS)]
        cells += [
            _cell([r.gap_s for r in own]),
            str(sum(r.num_requests for r in own)),
            str(sum(r.num_errors for r in own)),
            str(sum(r.num_wrong for r in own)),
        ]
        rows.append(f"| {' | '.join(cells)} |")
    names = ["fault", "role", *STEPS, "gap", "requests", "errors", "wrong"]
    return "\n".join([f"| {' | '.join(names)} |", "|" + "---|" * len(names), *rows])


def _cell(values: Sequence[float]) -> str:
    # a step that did not happen is NaN, and NaN != NaN
    made = [value for value in values if value == value]
    return results.Spread.of(made).text(".2f") if made else "-"


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default="", help="faults whose name holds this")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args(argv)
    chosen = [case for case in cases() if options.only in case.name]
    repairs = asyncio.run(measure(chosen, options.repeats))
    text = table(repairs)
    print(text)
    if options.out is not None:
        found = [asdict(repair) for repair in repairs]
        title = "How an instance is replaced, step by step"
        results.write(options.out, "loadtests.faults.recovery", title, ABOUT, text, repairs=found)
    return 1 if any(r.num_errors or r.num_wrong for r in repairs) else 0


if __name__ == "__main__":
    raise SystemExit(main())
