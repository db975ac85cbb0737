"""Makes all buckets at the start and after a wipe (F21), since most roles may not make buckets."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

import structlog

from pdmesh.errors import Unavailable
from pdmesh.net.nats.buckets import ALL_BUCKETS, LEASED
from pdmesh.net.nats.bus import NatsBus
from pdmesh.net.nats.kv_bucket import KvBucket

log = structlog.get_logger(__name__)

_LOOK_EVERY_S: Final = 5.0
_RETRY_S: Final = 0.25


class BucketKeeper:
    """Every master runs one. `lease_s` is the lease of the registry and of the election."""

    def __init__(self, bus: NatsBus, lease_s: float) -> None:
        self._bus = bus
        self._buckets = [
            KvBucket(bus, name, ttl_s=lease_s if name in LEASED else 0.0) for name in ALL_BUCKETS
        ]

    async def run(self) -> None:
        """Runs until cancelled. Makes no bucket if NATS has no permissions by role."""
        restored = asyncio.Event()
        forget = self._bus.on_restored(restored.set)
        try:
            while True:
                restored.clear()
                is_done = not self._bus.has_roles or await self._make_all()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK_EVERY_S if is_done else _RETRY_S):
                        await restored.wait()
        finally:
            forget()

    async def _make_all(self) -> bool:
        """Returns whether all buckets exist now."""
        for bucket in self._buckets:
            try:
                await bucket.ensure()
            except Unavailable as exc:
                log.debug("buckets.unavailable", error=exc.message)
                return False
        return True
