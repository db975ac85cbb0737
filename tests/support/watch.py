"""Collects errors, ends of requests and source exclusions from a mesh's NATS server.

With a source exclusion, a decode ejects or avoids a prefill as a source of KV for a while.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pdmesh.events.v1.events_pb2 import ErrorReported, RequestFinished
from pdmesh.launcher.mesh import Mesh
from pdmesh.net import subjects
from pdmesh.net.bus import Message
from pdmesh.net.convert.source_exclusions import excluded_from
from pdmesh.net.events import decode_event
from pdmesh.net.nats.bus import NatsBus
from pdmesh.net.nats.registry import NatsRegistry
from tests.support.waiting import until


class Watch:
    """Collects error events, events at the end of requests, and the records of instances."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.errors: list[ErrorReported] = []
        self.finished: list[RequestFinished] = []
        self.num_asked = 0

    @asynccontextmanager
    async def on(self) -> AsyncIterator[Watch]:
        bus = await NatsBus.connect(self.mesh.nats_url, "exclusions-test")

        async def error(message: Message) -> None:
            self.errors.append(decode_event(message, ErrorReported))

        async def finished(message: Message) -> None:
            self.finished.append(decode_event(message, RequestFinished))

        await bus.subscribe(subjects.error_reported(), error)
        await bus.subscribe(subjects.request_finished(), finished)
        self._view = await NatsRegistry(bus, 3.0).watch()
        try:
            yield self
        finally:
            await self._view.close()
            await bus.close()

    def excluded(self) -> set[tuple[str, str, str]]:
        """All source exclusions in the registry, as (decode, prefill, fault)."""
        return {
            (name, held.source.instance_id, held.fault.value)
            for name, record in self._view.records.items()
            for held in excluded_from(record)
        }

    def num_errors(self, what: str) -> int:
        return sum(what in (error.reason, *error.message.split(": ")) for error in self.errors)

    async def all_told(self) -> int:
        """Wait for the end events of all requests that were sent, and return their number."""
        await until(lambda: len(self.finished) == self.num_asked)
        return self.num_asked

    async def pairs_since(self, mark: int, count: int) -> Counter[tuple[str, str]]:
        """How often each (prefill, decode) pair served a request, after the first `mark` requests.

        Waits until at least `count` of these requests have ended.
        """
        await until(lambda: len(self.finished) >= mark + count)
        return Counter((e.prefill_id, e.decode_id) for e in self.finished[mark:])
