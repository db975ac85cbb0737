"""The index of blocks in Redis, by instance and tier, from which a restarted index starts.

Everything here may be wiped at any time. The epoch changes after a wipe (F14, F15), and when
sentinels choose another primary. Each command to Redis ends within about a quarter of a second. The
methods raise Unavailable, never redis-py's own errors, and do not retry for a minute as redis-py
does by default.
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

_CHUNK: Final = 5000  # blocks per call: a few ms, so that the store stays responsive
_TIMEOUT_S: Final = 0.25


@dataclass(frozen=True, slots=True)
class StoredInstance:
    """What the store holds of one instance, up to its delta `sequence`."""

    incarnation: int
    sequence: int
    blocks: frozenset[bytes]
    host: frozenset[bytes] = frozenset()

    def held_in(self, tier: Tier) -> frozenset[bytes]:
        return self.blocks if tier is Tier.ENGINE else self.host


class RedisIndex:
    def __init__(self, url: str, timeout_s: float = _TIMEOUT_S) -> None:
        # Any: redis-py's generic client; replies are bytes.
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
        """The store's epoch; `proposed` becomes it if the store has none, e.g. after a wipe.

        A new primary changes the epoch: it may lack the last writes to its predecessor.
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
        """None if nothing usable is stored."""
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
        """Add a delta to what the store has of this incarnation, in one transaction.

        It does not take a delta that clears.
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
        """Make the store hold exactly this for the instance. The cost grows with the difference."""
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
        """Forget an instance."""
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
