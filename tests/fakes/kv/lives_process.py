"""A process that starts and ends many KV transports, as an instance does when its role changes.

The process writes the address of each transport to stdout, and exits with 0 after the last.
"""

from __future__ import annotations

import asyncio
import random
import sys

import structlog

from pdmesh.kv.transport.base import KvConnection
from pdmesh.kv.transport.ucx import UcxTransport

_LONGEST_S = 0.03  # about the time of a connect, so that transports end at any moment of it


class _Handler:
    def on_connected(self, connection: KvConnection) -> None:
        connection.send([b"welcome"])

    def on_message(self, connection: KvConnection, message: memoryview) -> None: ...

    def on_closed(self, connection: KvConnection, reason: str) -> None: ...


async def main(num_lives: int, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(num_lives):
        transport = UcxTransport()
        print(await transport.start(_Handler()), flush=True)
        await asyncio.sleep(rng.uniform(0, _LONGEST_S))
        await transport.close()


if __name__ == "__main__":
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2])))
