"""Runs an embedded server (such as NATS or Valkey) during a measurement or a test.

A mesh starts such servers itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

from pdmesh.embedded import child
from pdmesh.embedded.servers import Server

_STOP_S: Final = 5.0


@contextlib.asynccontextmanager
async def running(server: Server, log_file: Path, timeout_s: float = 10.0) -> AsyncIterator[str]:
    """Run the server until the `with` block ends; yields the server's URL."""
    process = child.start(server.command(), os.environ, log_file)
    try:
        async with asyncio.timeout(timeout_s):
            while not await server.is_ready():
                if process.poll() is not None:
                    raise RuntimeError(
                        f"{server.name} ended with {process.returncode}; see {log_file}"
                    )
                await asyncio.sleep(0.01)
        yield server.url
    finally:
        process.terminate()
        try:
            process.wait(_STOP_S)
        finally:
            process.kill()
            process.wait()
            server.close()
