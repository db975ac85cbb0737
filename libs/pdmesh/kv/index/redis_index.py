"""The block index in Redis: shared by index processes, and the start of a restarted one.

Everything here may be wiped at any time; the epoch key tells (F14, F15). Calls end within about a
quarter of a second and raise Unavailable, never redis-py's own errors, whose defaults would retry
for a minute.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from pdmesh.core.kv.prefix.prefix_index import TIERS, IndexDelta
from pdmesh.core.kv.tiers.load_plan import Tier
from pdmesh.errors import Unavailable
from pdmesh.kv.index import redis_keys as keys

_CHUNK: Final = 500  # blocks per pipeline: a few ms, so that the store stays responsive
_TIMEOUT_S: Final = 0.25


@dataclass(frozen=True, slots=True)
class StoredInstance:
    """What the store holds of one instance, up to its delta `sequence`."""

    incarnation: int
    sequence: int
    model_fingerprint: str
    blocks: frozenset[bytes]
    host: frozenset[bytes] = frozenset()

    def held_in(self, tier: Tier) -> frozenset[bytes]:
        return self.blocks if tier is Tier.ENGINE else self.host


class RedisIndex:
    def __init__(self, url: str, timeout_s: float = _TIMEOUT_S) -> None:
        # Any: redis-py's generic client; replies are bytes.
        self._redis: Any = Redis.from_url(
            url,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),
            max_connections=4,
            client_name="pdmesh-index",
        )

    async def close(self) -> None:
        with contextlib.suppress(RedisError, OSError):
            await self._redis.aclose()

    async def epoch(self, proposed: str) -> str:
        """The store's epoch; `proposed` becomes it if the store has none, e.g. after a wipe."""
        async with self._answering():
            await self._redis.set(keys.EPOCH, proposed, nx=True)
            value = await self._redis.get(keys.EPOCH)
        return value.decode() if value else ""

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
                version[b"fingerprint"].decode(),
                frozenset(blocks),
                frozenset(host),
            )
        return None

    async def apply(self, delta: IndexDelta, model_fingerprint: str) -> None:
        """Add a delta to what the store has of this incarnation, in one transaction.

        Not for a delta that clears.
        """
        assert not delta.clears
        async with self._answering(), self._redis.pipeline(transaction=True) as pipe:
            for tier, part in zip(TIERS, (delta, delta.host), strict=True):
                if part is not None:
                    owner = _Owner(delta.instance_id, model_fingerprint, tier)
                    owner.move(pipe, part.removed, part.stored)
            pipe.sadd(keys.INSTANCES, delta.instance_id)
            _set_version(
                pipe, delta.instance_id, delta.incarnation, delta.sequence, model_fingerprint
            )
            await pipe.execute()

    async def replace(self, instance_id: str, instance: StoredInstance) -> None:
        """Make the store hold exactly this of the instance. The cost is the difference."""
        async with self._answering():
            fingerprint = instance.model_fingerprint
            before = await self._redis.hget(keys.instance_version(instance_id), "fingerprint")
            if before is not None and before.decode() != fingerprint:
                await self.remove(instance_id)
            version = keys.instance_version(instance_id)
            # The fingerprint stays: it is needed to find the blocks of a half-written instance.
            await self._redis.hdel(version, "incarnation", "sequence")
            await self._redis.hset(version, mapping={"fingerprint": fingerprint})
            await self._redis.sadd(keys.INSTANCES, instance_id)
            for tier in TIERS:
                owner, held = _Owner(instance_id, fingerprint, tier), instance.held_in(tier)
                for chunk in _chunks(await self._known_blocks(owner) - held):
                    await self._move(owner, chunk, ())
                # All of them, not only the new: after a wipe the reverse key may be back before the
                # blocks.
                for chunk in _chunks(held):
                    await self._move(owner, (), chunk)
            async with self._redis.pipeline(transaction=True) as pipe:
                _set_version(
                    pipe, instance_id, instance.incarnation, instance.sequence, fingerprint
                )
                await pipe.execute()

    async def remove(self, instance_id: str) -> None:
        """Forget an instance. The cost is its blocks."""
        async with self._answering():
            value = await self._redis.hget(keys.instance_version(instance_id), "fingerprint")
            fingerprint = value.decode() if value else ""
            for tier in TIERS:
                owner = _Owner(instance_id, fingerprint, tier)
                for chunk in _chunks(await self._known_blocks(owner)):
                    await self._move(owner, chunk, ())
            async with self._redis.pipeline(transaction=True) as pipe:
                pipe.delete(*(keys.instance_blocks(instance_id, tier) for tier in TIERS))
                pipe.delete(keys.instance_version(instance_id))
                pipe.srem(keys.INSTANCES, instance_id)
                await pipe.execute()

    async def match(
        self, model_fingerprint: str, block_hashes: Sequence[bytes], tier: Tier = Tier.ENGINE
    ) -> dict[str, int]:
        """Contiguous blocks from the start per instance, in one round trip."""
        async with self._answering(), self._redis.pipeline(transaction=False) as pipe:
            for block_hash in block_hashes:
                pipe.smembers(keys.block(model_fingerprint, block_hash))
            holders = await pipe.execute()
        matches: dict[str, int] = {}
        for position, members in enumerate(holders):
            for member in members:
                name = keys.instance_of(member, tier)
                if name is not None and matches.get(name, 0) == position:
                    matches[name] = position + 1
        return matches

    async def _known_blocks(self, owner: _Owner) -> frozenset[bytes]:
        return frozenset(await self._redis.smembers(owner.blocks_key))

    async def _move(self, owner: _Owner, removed: Sequence[bytes], stored: Sequence[bytes]) -> None:
        async with self._redis.pipeline(transaction=True) as pipe:
            owner.move(pipe, removed, stored)
            await pipe.execute()

    @contextlib.asynccontextmanager
    async def _answering(self) -> AsyncIterator[None]:
        try:
            yield
        except (RedisError, OSError, TimeoutError) as exc:
            raise Unavailable(f"Redis: {exc or type(exc).__name__}") from exc


@dataclass(frozen=True, slots=True)
class _Owner:
    """One tier of one instance under one model."""

    instance_id: str
    model_fingerprint: str
    tier: Tier

    @property
    def blocks_key(self) -> str:
        return keys.instance_blocks(self.instance_id, self.tier)

    def move(self, pipe: Any, removed: Sequence[bytes], stored: Sequence[bytes]) -> None:
        holder = keys.holder(self.instance_id, self.tier)
        for block_hash in removed:
            pipe.srem(keys.block(self.model_fingerprint, block_hash), holder)
        for block_hash in stored:
            pipe.sadd(keys.block(self.model_fingerprint, block_hash), holder)
        if removed:
            pipe.srem(self.blocks_key, *removed)
        if stored:
            pipe.sadd(self.blocks_key, *stored)


def _set_version(
    pipe: Any, instance_id: str, incarnation: int, sequence: int, model_fingerprint: str
) -> None:
    fields = {"incarnation": incarnation, "sequence": sequence, "fingerprint": model_fingerprint}
    pipe.hset(keys.instance_version(instance_id), mapping=fields)


def _chunks(blocks: Collection[bytes]) -> Iterator[list[bytes]]:
    iterator = iter(sorted(blocks))
    while chunk := list(islice(iterator, _CHUNK)):
        yield chunk
