"""Real NATS and Valkey servers that a test can kill, pause and restart on the same address."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
from pathlib import Path

from pdmesh.embedded import child
from pdmesh.embedded.servers import NatsServer, Server, ValkeyServer
from tests.support.sites.processes import is_stopped
from tests.support.waiting import wait_until


class TestServer:
    """One server process.

    `start` after `kill` restarts the server with the same address and directory.
    """

    __test__ = False

    def __init__(self, server: Server, directory: Path) -> None:
        self._server = server
        self.directory = directory
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return self._server.url

    async def start(self) -> None:
        log_file = self.directory.parent / f"{self._server.name}.log"
        self._process = child.start(self._server.command(), os.environ, log_file)
        async with asyncio.timeout(30):
            while not await self._server.is_ready():
                assert self._process.poll() is None, log_file.read_text()
                await asyncio.sleep(0.01)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def pause(self) -> None:
        assert self._process is not None
        pid = self._process.pid
        self._process.send_signal(signal.SIGSTOP)
        wait_until(lambda: is_stopped(pid))

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def wipe(self) -> None:
        """Delete all data. The server must be stopped."""
        shutil.rmtree(self.directory)

    def close(self) -> None:
        if self._process is not None:
            self.kill()
        self._server.close()


def nats(directory: Path) -> TestServer:
    return TestServer(NatsServer(directory / "nats"), directory / "nats")


def valkey(directory: Path) -> TestServer:
    return TestServer(ValkeyServer(directory / "valkey"), directory / "valkey")
