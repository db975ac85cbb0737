"""Ends an instance whose engine hangs, or which the health-monitor judged faulty.

`core.instance.engine_watchdog` decides whether the engine hangs. The health-monitor publishes its
verdicts on the fault board, and `core.health.fault_levels` decides whether a verdict ends this
incarnation. The instance then ends itself, and its supervisor (launcher or container runtime)
starts it again. So no other process needs to know the instance's pid. The module also adds the
engine's silence, the node's device faults and the instance's counters to each heartbeat.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import structlog

from pdmesh.core.health.fault_judge import Signal
from pdmesh.core.health.fault_levels import must_restart
from pdmesh.core.health.node_status import signals_from_file
from pdmesh.core.instance.engine_watchdog import (
    DeclareHung,
    EngineWatchdog,
    PingAnswered,
    SendPing,
    WorkSeen,
)
from pdmesh.core.model import Tick
from pdmesh.errors import EngineFailed, InstanceLost
from pdmesh.events.v1.events_pb2 import FaultReport, InstanceHealth
from pdmesh.instance.legs.host import ENGINE_DIED, InstanceHost
from pdmesh.net.convert.fault_signals import signal_to, vitals_to
from pdmesh.net.nats.board import Board
from pdmesh.net.tasks import end, together

log = structlog.get_logger(__name__)

_LAST_WORD_S: Final = 1.0

ReadNode = Callable[[], Sequence[Signal]]


class RestartVerdict:
    """The fault board's verdict that this incarnation must restart."""

    def __init__(self, board: Board[FaultReport], instance_id: str, incarnation: int) -> None:
        self._board, self._incarnation = board, (instance_id, incarnation)

    async def wait(self) -> FaultReport:
        verdict: asyncio.Future[FaultReport] = asyncio.get_running_loop().create_future()

        def on_report(report: FaultReport) -> None:
            is_mine = (report.instance_id, report.instance_incarnation) == self._incarnation
            ends = is_mine and must_restart(report.level, report.held_back)
            if ends and not verdict.done():
                verdict.set_result(report)

        view = self._board.watch(on_report)
        try:
            return await verdict
        finally:
            await view.close()


class Watchdog:
    """Watches the engine and the fault board.

    `say_now` sends a heartbeat at once. `node` reads the faults of this instance's devices.
    """

    def __init__(
        self,
        host: InstanceHost,
        watch: EngineWatchdog,
        verdict: RestartVerdict,
        say_now: Callable[[], None],
        node: ReadNode = lambda: (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine, self._host, self._node = host.engine, host, node
        self._say_now, self._clock = say_now, clock
        self._watch, self._verdict = watch, verdict

    def describe(self, health: InstanceHealth) -> None:
        """Add this instance's signals and counters to a heartbeat."""
        own = self._watch.signal(self._clock())
        signals = [*self._node(), *([own] if own else [])]
        health.signals.extend(map(signal_to, signals))
        vitals = self._host.vitals
        vitals.num_slots_used = self._host.admission.num_slots_used
        vitals.num_tokens = self._engine.stats().num_tokens
        health.vitals.CopyFrom(vitals_to(vitals))

    async def run(self) -> None:
        """Run until the instance must end. Then fail all legs and raise EngineFailed."""
        try:
            await together(self._mind_the_engine(), self._mind_the_judge())
        except EngineFailed as exc:
            self._host.fail_all(exc.reason, exc.message)  # clients continue elsewhere at once
            self._say_now()  # tells the health-monitor, which counts restarts, the reason
            await asyncio.sleep(_LAST_WORD_S)
            raise

    async def _mind_the_engine(self) -> None:
        ping: asyncio.Task[None] | None = None
        num_signs = 0
        try:
            while True:
                before, num_signs = num_signs, self._engine.stats().num_signs
                if num_signs != before:
                    self._watch.handle(WorkSeen(), self._clock())
                if ping is not None and ping.done():
                    ping.result()
                    self._watch.handle(PingAnswered(), self._clock())
                    ping = None
                for effect in self._watch.handle(Tick(), self._clock()):
                    match effect:
                        case SendPing():
                            ping = asyncio.create_task(self._engine.ping(), name="engine-ping")
                        case DeclareHung(silent_s):
                            log.error("engine.hung", silent_s=round(silent_s, 1))
                            message = f"the engine did not answer for {silent_s:.0f} s"
                            raise EngineFailed(message, reason=ENGINE_DIED)
                await asyncio.sleep(self._watch.period_s)
        finally:
            if ping is not None:
                await end([ping])

    async def _mind_the_judge(self) -> None:
        report = await self._verdict.wait()
        reasons = ", ".join(s.reason for s in report.signals)
        log.error("instance.judged_faulty", level=report.level, reasons=reasons)
        raise EngineFailed(f"judged faulty: {reasons}", reason=InstanceLost.default_reason)


def node_reader(
    file: Path, devices: Sequence[str], wall_clock: Callable[[], float] = time.time
) -> ReadNode:
    """Reads the faults of these devices from the node's status file. No file means no faults."""

    def read() -> Sequence[Signal]:
        try:
            text = file.read_text(errors="replace")
        except OSError:
            return ()
        return signals_from_file(text, devices, wall_clock())

    return read


def device_names(setting: str, instance_id: str, environment: Mapping[str, str]) -> list[str]:
    """The names of the devices that an instance computes on.

    For an instance without devices, the list has the instance's id, so that its node's agent can
    report faults under this name.
    """
    text = setting or environment.get("CUDA_VISIBLE_DEVICES") or _given_to_container(environment)
    return [name.strip() for name in text.split(",") if name.strip()] or [instance_id]


def _given_to_container(environment: Mapping[str, str]) -> str:
    """The devices that NVIDIA's container runtime gave this container, if it names them."""
    names = environment.get("NVIDIA_VISIBLE_DEVICES", "")
    return "" if names in ("all", "none", "void") else names
