"""Collects outputs until the host reads them, in one batch per turn of the event loop.

vLLM delivers the tokens of one step to all waiting jobs in the same turn, so a batch has the
outputs of one step. The host is the part of the instance outside the engine. A leg is a request's
stay on this instance. A ticket is the right to pull a prompt's KV.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable

from pdmesh.engine.base import (
    AdaptersChanged,
    BlocksChanged,
    Failed,
    LandingFreed,
    Output,
    Prefilled,
    TicketClosed,
    TiersReported,
    TokenBatch,
)
from pdmesh.errors import EngineFailed


class OutputQueue:
    """The host's admission bounds the queue, because nearly all outputs belong to admitted legs."""

    def __init__(self) -> None:
        self._outputs: list[Output] = []
        self._changed = asyncio.Event()
        self._failure: EngineFailed | None = None

    def put(self, outputs: Iterable[Output]) -> None:
        before = len(self._outputs)
        self._outputs.extend(outputs)
        if len(self._outputs) > before:
            self._changed.set()

    def drop(self, leg: int) -> None:
        """Drop the unread outputs of an aborted leg, except those that free its memory ranges.

        `Failed`, and a `Prefilled` without a ticket, are kept, because no `TicketClosed` may follow
        them.
        """
        self._outputs = [o for o in self._outputs if not _belongs_to(o, leg)]

    def fail(self, failure: EngineFailed) -> None:
        """The engine is dead. The reader receives the remaining outputs, and then the failure."""
        self._failure = self._failure or failure
        self._changed.set()

    @property
    def has_failed(self) -> bool:
        return self._failure is not None

    async def batches(self) -> AsyncIterator[list[Output]]:
        while True:
            await self._changed.wait()
            self._changed.clear()
            batch, self._outputs = self._outputs, []
            if batch:
                yield batch
            if self._failure is not None and not self._outputs:
                raise self._failure


def _belongs_to(output: Output, leg: int) -> bool:
    match output:
        case TicketClosed() | LandingFreed() | BlocksChanged() | TokenBatch() | Failed():
            return False
        case TiersReported() | AdaptersChanged():
            return False
        case Prefilled(ticket=None):
            return False
        case _:
            return output.leg == leg
