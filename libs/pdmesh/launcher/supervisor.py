"""Starts, stops and restarts the child processes of a launcher.

`core.control.restart_policy` decides when a process is restarted or given up. When a process dies,
its process group is killed, so that a restarted process never meets children of the dead one. An
error in a callback does not affect the supervisor.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pdmesh.core.control.restart_policy import (
    BecameReady,
    Effect,
    Event,
    Exited,
    GiveUp,
    ProcessPhase,
    RestartPolicy,
    RestartScheduled,
    SignalStop,
    StartAsked,
    StartProcess,
    StopAsked,
    Supervision,
)
from pdmesh.core.model import Tick
from pdmesh.embedded import child
from pdmesh.launcher.spec import STOP_GRACE_S, ProcessSpec

Notice = RestartScheduled | GiveUp | StartProcess
_POLL_S: Final = 0.05
_CANNOT_RUN: Final = 1


@dataclass(slots=True)
class _Running:
    process: subprocess.Popen[bytes]
    watch: asyncio.Task[None]
    grace: asyncio.TimerHandle | None = None


class Supervisor:
    """Starts and watches processes. Use a supervisor only on the main thread's event loop.

    The kernel kills a child when the thread that started it ends (see `embedded.child`).
    """

    def __init__(
        self,
        log_dir: Path,
        on_notice: Callable[[Notice], None],
        policy: RestartPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._core = Supervision(policy or RestartPolicy())
        self._log_dir, self._on_notice, self._clock = log_dir, on_notice, clock
        self._specs: dict[str, ProcessSpec] = {}
        self._running: dict[str, _Running] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._changed = asyncio.Event()
        log_dir.mkdir(mode=0o700, parents=True, exist_ok=True)

    @property
    def specs(self) -> Mapping[str, ProcessSpec]:
        return self._specs

    def phase(self, name: str) -> ProcessPhase:
        return self._core.phase(name)

    def deaths(self, name: str) -> int:
        return self._core.deaths(name)

    def is_ready(self, name: str) -> bool:
        """Whether `ready` was called for the current process."""
        return self._core.is_ready(name)

    def pid(self, name: str) -> int | None:
        """The pid of the process, or None while it does not run."""
        running = self._running.get(name)
        return running.process.pid if running else None

    def log_file(self, name: str) -> Path:
        return self._log_dir / f"{name}.log"

    def start(self, spec: ProcessSpec) -> None:
        self._specs[spec.name] = spec
        self._feed(StartAsked(spec.name))

    def ready(self, name: str) -> None:
        self._feed(BecameReady(name))

    def signal(self, name: str, number: signal.Signals) -> None:
        """Signal the process, but not its children. Raises KeyError if the process does not run."""
        self._running[name].process.send_signal(number)

    def kill(self, name: str) -> None:
        """Kill the process and its children at once. Unless `stop` was called, it is restarted."""
        if (pid := self.pid(name)) is not None:
            child.signal_group(pid, signal.SIGKILL)

    def lose(self, names: Iterable[str]) -> None:
        """Kill the processes at once, as if their site were lost. Do not restart them."""
        lost = list(names)
        for name in lost:
            self.kill(name)
        for name in lost:
            self._feed(StopAsked(name))

    async def stop(self, name: str) -> None:
        """Ask the process to end, kill it after its grace period, and wait for its end."""
        self._feed(StopAsked(name))
        while name in self._running:
            self._changed.clear()
            await self._changed.wait()

    def kill_all(self) -> None:
        """Kill all processes at once, and restart none."""
        for name in list(self._specs):
            self._feed(StopAsked(name))
            self.kill(name)

    def _feed(self, event: Event) -> None:
        for effect in self._core.handle(event, self._clock()):
            self._apply(effect)
        self._arm()

    def _apply(self, effect: Effect) -> None:
        match effect:
            case StartProcess(name):
                self._tell(effect)
                self._spawn(name)
            case SignalStop(name):
                self._ask_to_end(name)
            case RestartScheduled() | GiveUp():
                self._tell(effect)

    def _tell(self, notice: Notice) -> None:
        """Call `on_notice` in a later turn of the event loop.

        So an exception of the callback reaches the loop's exception handler, not the supervisor.
        """
        asyncio.get_running_loop().call_soon(self._on_notice, notice)

    def _spawn(self, name: str) -> None:
        spec = self._specs[name]
        try:
            if spec.ops_file is not None:
                spec.ops_file.unlink(missing_ok=True)
            process = child.start(spec.command, spec.env, self.log_file(name))
        except OSError as exc:  # no disk space, memory or pids: counts as a death at the start
            with contextlib.suppress(OSError), self.log_file(name).open("a") as log:
                log.write(f"cannot start: {exc.strerror}\n")
            asyncio.get_running_loop().call_soon(self._not_spawned, name)
            return
        watch = asyncio.create_task(self._watch(name, process), name=f"watch-{name}")
        self._running[name] = _Running(process, watch)

    def _not_spawned(self, name: str) -> None:
        if name not in self._running:  # else it was stopped and started again meanwhile
            self._feed(Exited(name, _CANNOT_RUN))

    async def _watch(self, name: str, process: subprocess.Popen[bytes]) -> None:
        code = await _exit_code(process)
        child.signal_group(process.pid, signal.SIGKILL)  # kills the dead process's children
        running = self._running.pop(name)
        if running.grace is not None:
            running.grace.cancel()
        self._feed(Exited(name, code))
        self._changed.set()

    def _ask_to_end(self, name: str) -> None:
        running = self._running.get(name)
        if running is None:  # the start failed, and `_not_spawned` has not run yet
            self._feed(Exited(name, _CANNOT_RUN))
            return
        running.process.terminate()
        child.signal_group(running.process.pid, signal.SIGCONT)  # a frozen process cannot end
        grace_s = STOP_GRACE_S[self._specs[name].tier]
        loop = asyncio.get_running_loop()
        running.grace = loop.call_later(grace_s, self.kill, name)

    def _arm(self) -> None:
        """Set the timer for the next restart."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due = self._core.next_start_at()
        if due is not None:
            delay_s = max(0.0, due - self._clock())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._feed, Tick())


async def _exit_code(process: subprocess.Popen[bytes]) -> int:
    """Wait for the end of a process without a thread: with a pidfd, or else by polling."""
    if hasattr(os, "pidfd_open"):
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        handle = os.pidfd_open(process.pid)
        loop.add_reader(handle, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(handle)
            os.close(handle)
    while (code := process.poll()) is None:  # noqa: ASYNC110  # there is nothing to wait on
        await asyncio.sleep(_POLL_S)
    return code
