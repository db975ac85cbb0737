"""Copies the index of KV blocks from memory to Redis, so that a restarted process can load it.

Normally, each delta (a change of one instance's blocks) is written as it arrives. In some cases all
blocks of the instance are written instead, for example after a snapshot, after a failed write, or
if too many deltas wait. Redis also stores a random epoch. If the epoch has changed, Redis was
wiped, and all instances are written (F14, F15).
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import secrets
from typing import Final

import structlog

from pdmesh.core.kv.prefix.prefix_index import TIERS, IndexDelta, PrefixIndex
from pdmesh.errors import Unavailable
from pdmesh.kv.index.redis_index import RedisIndex, StoredInstance
from pdmesh.telemetry import metrics, names

log = structlog.get_logger(__name__)

_LOOK_EVERY_S: Final = 0.5  # how often the epoch is checked if nothing is to be written
_MAX_DELTAS: Final = 64

_errors = metrics.counter(names.INDEX_STORE_ERRORS, "Failed calls to Redis")


class _Work(enum.Enum):
    WHOLE = "whole"
    GONE = "gone"


class RedisMirror:
    """Copies the index to Redis. The index feed reports each change through the `on_` methods."""

    def __init__(self, index: PrefixIndex, store: RedisIndex) -> None:
        self._index, self._store = index, store
        self._pending: dict[str, list[IndexDelta] | _Work] = {}
        self._wake = asyncio.Event()
        self._epoch = ""
        self._is_store_up = True
        self._is_writing = False

    @property
    def is_current(self) -> bool:
        """True while Redis has the same blocks as the index in memory."""
        is_written = not self._pending and not self._is_writing
        return self._is_store_up and is_written and bool(self._epoch)

    @property
    def is_store_up(self) -> bool:
        """False after `run` failed to reach Redis, until it has written everything that waits."""
        return self._is_store_up

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    def on_delta(self, delta: IndexDelta) -> None:
        pending = self._pending.setdefault(delta.instance_id, [])
        if isinstance(pending, list):
            pending.append(delta)
            if len(pending) > _MAX_DELTAS:
                self._pending[delta.instance_id] = _Work.WHOLE
        elif pending is _Work.GONE:
            self._pending[delta.instance_id] = _Work.WHOLE
        self._wake.set()

    def on_replaced(self, instance_id: str) -> None:
        self._pending[instance_id] = _Work.WHOLE
        self._wake.set()

    def on_removed(self, instance_id: str) -> None:
        self._pending[instance_id] = _Work.GONE
        self._wake.set()

    async def restore(self, incarnations: dict[str, int]) -> int:
        """Load the blocks of the given instances from Redis.

        `run` then removes all other instances and incarnations from Redis. Returns the number of
        loaded instances.
        """
        num_loaded = 0
        try:
            for instance_id in await self._store.instance_ids():
                stored = await self._store.load(instance_id)
                if stored is None or incarnations.get(instance_id) != stored.incarnation:
                    self.on_removed(instance_id)
                    continue
                self._index.load_snapshot(
                    instance_id, stored.incarnation, stored.sequence, stored.blocks, stored.host
                )
                num_loaded += 1
        except Unavailable as exc:
            log.warning("index.store_unavailable", error=exc.message)
        return num_loaded

    async def run(self) -> None:
        while True:
            try:
                await self._look()
                await self._write_pending()
                self._set_up(True)
            except Unavailable as exc:
                _errors.add(1)
                self._set_up(False, exc.message)
                await asyncio.sleep(_LOOK_EVERY_S)
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_EVERY_S):
                    await self._wake.wait()

    async def _look(self) -> None:
        """Check whether Redis was wiped or replaced since the last call. If so, and at the first
        call, mark all instances to be written.
        """
        epoch = await self._store.epoch(secrets.token_hex(8))
        if epoch != self._epoch:
            if self._epoch:
                log.warning("index.store_wiped", num_instances=len(self._index.instance_ids()))
            self._epoch = epoch
            for instance_id in self._index.instance_ids():
                self.on_replaced(instance_id)

    async def _write_pending(self) -> None:
        self._wake.clear()
        for instance_id in list(self._pending):
            work = self._pending.pop(instance_id)
            self._is_writing = True
            try:
                await self._write(instance_id, work)
            except BaseException:  # also a cancellation: Redis may have a part of it
                self._pending.setdefault(
                    instance_id, _Work.GONE if work is _Work.GONE else _Work.WHOLE
                )
                if isinstance(self._pending[instance_id], list):
                    self._pending[instance_id] = _Work.WHOLE
                raise
            finally:
                self._is_writing = False

    async def _write(self, instance_id: str, work: list[IndexDelta] | _Work) -> None:
        version = self._index.version(instance_id)
        if work is _Work.GONE or version is None:
            await self._store.remove(instance_id)
        elif isinstance(work, list):
            for delta in work:
                await self._store.apply(delta)
        elif not self._index.is_loading(instance_id):  # else `on_replaced` is called after the load
            held = (self._index.blocks(instance_id, tier) for tier in TIERS)
            await self._store.replace(instance_id, StoredInstance(*version, *held))

    def _set_up(self, is_up: bool, error: str = "") -> None:
        if is_up and not self._is_store_up:
            log.info("index.store_back")
        elif not is_up and self._is_store_up:
            log.warning("index.store_unavailable", error=error)
        self._is_store_up = is_up
