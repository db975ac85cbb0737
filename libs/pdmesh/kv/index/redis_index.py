"""A copy in Redis of the block index: which blocks each instance has in its engine and host pool.

A restarted kv-cache-index reads it. Redis may be wiped at any time. The store has an epoch, which
changes after a wipe (F14, F15) and when sentinels choose another primary. A command to Redis takes
at most about a quarter of a second and is not retried. The methods raise Unavailable instead of
redis-py's own errors.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Collection, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from pdmesh.core.kv.prefix.prefix_index import TIERS, IndexDelta
from pdmesh.core.kv.tier import Tier
from pdmesh.errors import Unavailable
from pdmesh.kv.index import redis_keys as keys
from pdmesh.net.redis_pool import pool_of, primary_of

_CHUNK: Final = 5000  # blocks per command, which takes a few ms, so Redis stays responsive
_TIMEOUT_S: Final = 0.25


@dataclass(frozen=True, slots=True)
class StoredInstance:
    """The stored blocks of one instance, after its delta (published change) number `sequence`.

    `blocks` are in the engine and `host` are in the host pool.
    """

    incarnation: int
    sequence: int
    blocks: frozenset[bytes]
    host: frozenset[bytes] = frozenset()

    def held_in(self, tier: Tier) -> frozenset[bytes]:
        return self.blocks if tier is Tier.ENGINE else self.host


class RedisIndex:
    def __init__(self, url: str, timeout_s: float = _TIMEOUT_S) -> None:
        # The type is Any because redis-py's client is generic. Replies are bytes.
        self._redis: Any = Redis.from_pool(
            pool_of(
                ConnectionPool,
                url,
                socket_timeout=timeout_s,
                socket_connect_timeout=timeout_s,
                retry=Retry(NoBackoff(), 0),
                max_connections=4,
                client_name="pdmesh-index",
            )
        )

    async def close(self) -> None:
        with contextlib.suppress(RedisError, OSError):
            await self._redis.aclose()

    async def epoch(self, proposed: str) -> str:
        """The store's epoch. If the store has none, as after a wipe, `proposed` becomes its epoch.

        The epoch includes the address of the primary, because a new primary may lack the last
        writes to the old one.
        """
        async with self._answering():
            await self._redis.set(keys.EPOCH, proposed, nx=True)
            value = await self._redis.get(keys.EPOCH)
        primary = primary_of(self._redis.connection_pool)
        return f"{value.decode()}{primary and '@'}{primary}" if value else ""

    async def instance_ids(self) -> list[str]:
        async with self._answering():
            return sorted(member.decode() for member in await self._redis.smembers(keys.INSTANCES))

    async def load(self, instance_id: str) -> StoredInstance | None:
        """Read the data of one instance. Returns None if the store has no usable data of it."""
        async with self._answering(), self._redis.pipeline(transaction=True) as pipe:
            pipe.hgetall(keys.instance_version(instance_id))
            for tier in TIERS:
                pipe.smembers(keys.instance_blocks(instance_id, tier))
            version, blocks, host = await pipe.execute()
        with contextlib.suppress(KeyError, ValueError):
            return StoredInstance(
                int(version[b"incarnation"]),
                int(version[b"sequence"]),
                frozenset(blocks),
                frozenset(host),
            )
        return None

    async def apply(self, delta: IndexDelta) -> None:
        """Apply a delta to the stored blocks of its instance, in one transaction.

        The delta must be for the stored incarnation and must not clear all blocks.
        """
        assert not delta.clears
        name = delta.instance_id
        async with self._answering(), self._redis.pipeline(transaction=True) as pipe:
            for tier, part in zip(TIERS, (delta, delta.host), strict=True):
                blocks = keys.instance_blocks(name, tier)
                if part is not None and part.removed:
                    pipe.srem(blocks, *part.removed)
                if part is not None and part.stored:
                    pipe.sadd(blocks, *part.stored)
            pipe.sadd(keys.INSTANCES, name)
            pipe.hset(keys.instance_version(name), mapping=_version(delta))
            await pipe.execute()

    async def replace(self, instance_id: str, instance: StoredInstance) -> None:
        """Replace the stored data of an instance. Only differences are written."""
        version = keys.instance_version(instance_id)
        async with self._answering():
            await self._redis.delete(version)
            await self._redis.sadd(keys.INSTANCES, instance_id)
            for tier in TIERS:
                blocks, held = keys.instance_blocks(instance_id, tier), instance.held_in(tier)
                known = frozenset(await self._redis.smembers(blocks))
                for chunk in _chunks(known - held):
                    await self._redis.srem(blocks, *chunk)
                for chunk in _chunks(held - known):
                    await self._redis.sadd(blocks, *chunk)
            await self._redis.hset(version, mapping=_version(instance))

    async def remove(self, instance_id: str) -> None:
        blocks = [keys.instance_blocks(instance_id, tier) for tier in TIERS]
        async with self._answering(), self._redis.pipeline(transaction=True) as pipe:
            pipe.unlink(keys.instance_version(instance_id), *blocks)
            pipe.srem(keys.INSTANCES, instance_id)
            await pipe.execute()

    @contextlib.asynccontextmanager
    async def _answering(self) -> AsyncIterator[None]:
        try:
            yield
        except (RedisError, OSError, TimeoutError) as exc:
            raise Unavailable(f"Redis: {exc or type(exc).__name__}") from exc


def _version(of: IndexDelta | StoredInstance) -> dict[str, int]:
    return {"incarnation": of.incarnation, "sequence": of.sequence}


def _chunks(blocks: Collection[bytes]) -> Iterator[list[bytes]]:
    iterator = iter(sorted(blocks))
    while chunk := list(islice(iterator, _CHUNK)):
        yield chunk
