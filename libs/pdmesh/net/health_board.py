"""The health-monitor's verdicts where everybody can read them: bucket `pdmesh-health`, one HealthChanged in JSON per instance.

They outlive the monitor: its last verdicts stand until another one writes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import structlog
from google.protobuf.json_format import Parse, ParseError

from pdmesh.events.v1.events_pb2 import HealthChanged
from pdmesh.net.event_json import to_json
from pdmesh.net.nats_bus import NatsBus
from pdmesh.net.nats_kv import KvBucket, KvEntry, KvWatch

log = structlog.get_logger(__name__)

BUCKET: Final = "pdmesh-health"


class HealthBoard:
    def __init__(self, bus: NatsBus) -> None:
        self._bucket = KvBucket(bus, BUCKET)

    async def write(self, change: HealthChanged) -> None:
        """Raises Unavailable."""
        await self._bucket.put(change.instance_id, to_json(change))

    async def forget(self, instance_id: str) -> None:
        """Raises Unavailable."""
        await self._bucket.delete(instance_id)

    def watch(self, on_verdict: Callable[[HealthChanged], None]) -> HealthBoardView:
        return HealthBoardView(self._bucket, on_verdict)


class HealthBoardView:
    """Hands out every verdict there is, then each new one; all of them again after an outage."""

    def __init__(self, bucket: KvBucket, on_verdict: Callable[[HealthChanged], None]) -> None:
        self._on_verdict = on_verdict
        self.known: dict[str, HealthChanged] = {}
        self.loaded = asyncio.Event()
        self._watch: KvWatch = bucket.watch(self._on_entry, self.loaded.set, lambda: None)

    async def close(self) -> None:
        await self._watch.close()

    def _on_entry(self, entry: KvEntry) -> None:
        if entry.value is None:
            self.known.pop(entry.key, None)
            return
        try:
            verdict = Parse(entry.value, HealthChanged(), ignore_unknown_fields=True)
        except ParseError:
            log.warning("health.bad_verdict", key=entry.key)
            return
        self.known[entry.key] = verdict
        self._on_verdict(verdict)
