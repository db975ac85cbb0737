"""An embedded server for the duration of a measurement or test; a mesh has its own."""

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
    """Run the server as long as the block runs; yields its URL."""
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
