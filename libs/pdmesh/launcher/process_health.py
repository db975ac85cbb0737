"""Asks the processes of a mesh whether they are alive and ready, and kills those that hang."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from pdmesh.core.control.hung_processes import SILENCE_S, HungProcesses
from pdmesh.embedded.servers import Server
from pdmesh.launcher import probe
from pdmesh.launcher.supervisor import Supervisor


class ProcessHealth:
    """Kills each process that does not answer for `SILENCE_S`. The supervisor restarts it (S74)."""

    def __init__(
        self,
        supervisor: Supervisor,
        servers: Mapping[str, Server],
        report: Callable[[str], None],
    ) -> None:
        self._supervisor, self._servers = supervisor, servers
        self._report = report
        self._hung = HungProcesses()

    def ops_address(self, name: str) -> str:
        """The host:port of /metrics and /health.

        Empty for servers, and for a service that has not written its address yet.
        """
        ops_file = self._supervisor.specs[name].ops_file
        try:
            return ops_file.read_text() if ops_file else ""
        except FileNotFoundError:
            return ""

    async def missing(self, name: str) -> str:
        """A text that says what the process waits for. Empty if the process is ready."""
        if self._supervisor.pid(name) is None:
            return "not running"
        if name in self._servers:
            return "" if await self._servers[name].is_ready() else "starting"
        address = self.ops_address(name)
        if not address:
            return "starting"
        missing = await probe.not_ready(address)
        return "no answer" if missing is None else ", ".join(missing)

    async def note_ready(self) -> None:
        """Tell the supervisor which processes have become ready since their start."""
        for name in list(self._supervisor.specs):
            pid = self._supervisor.pid(name)
            if pid is None or self._supervisor.is_ready(name):
                continue
            if not await self.missing(name) and self._supervisor.pid(name) == pid:
                self._supervisor.ready(name)

    async def kill_silent(self) -> None:
        for name in list(self._supervisor.specs):
            if self._supervisor.pid(name) is None:
                continue
            is_live = await self._is_live(name)
            if self._hung.probed(name, time.monotonic(), is_live=is_live):
                self._report(f"{name} has not answered for {SILENCE_S:g} s; killing it")
                self._supervisor.kill(name)

    async def _is_live(self, name: str) -> bool:
        if name in self._servers:
            return await self._servers[name].is_alive()
        address = self.ops_address(name)
        return not address or await probe.is_live(address)
