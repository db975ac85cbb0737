"""Decides which clients are disconnected because they do not read, over HTTP and gRPC (F28)."""

from __future__ import annotations

import asyncio
import time
from typing import Final, Protocol

import structlog

log = structlog.get_logger(__name__)

_LOOK_EVERY_S: Final = 0.5


class AnswerWriter(Protocol):
    """The writer of one answer to its client."""

    request_id: str
    blocked_since: float  # the monotonic time at which a write began to wait, inf if none waits

    def cut(self) -> None:
        """Disconnect the client."""


class SlowClients:
    """The answers under way at one endpoint (`http` or `grpc`).

    A client that has read nothing for `write_timeout_s` is disconnected.
    """

    def __init__(self, endpoint: str, write_timeout_s: float) -> None:
        self._event = f"{endpoint}.client_not_reading"
        self._write_timeout_s = write_timeout_s
        self._writing: dict[AnswerWriter, None] = {}

    def __len__(self) -> int:
        """The number of answers under way."""
        return len(self._writing)

    def add(self, writer: AnswerWriter) -> None:
        self._writing[writer] = None

    def remove(self, writer: AnswerWriter) -> None:
        del self._writing[writer]

    async def run(self) -> None:
        """Runs until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            self.look(time.monotonic())

    def look(self, now: float) -> None:
        """Disconnect the clients that have read nothing for too long."""
        limit = now - self._write_timeout_s
        for writer in [w for w in self._writing if w.blocked_since < limit]:
            log.info(self._event, request_id=writer.request_id)
            writer.cut()
