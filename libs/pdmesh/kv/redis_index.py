"""The block index in Redis: shared truth between index processes, and what a restarted one starts from.

Everything here may be wiped at any time; the epoch key tells (F14, F15). Calls end within about a quarter of a second and raise
Unavailable, never redis-py's own errors, whose defaults would retry for a minute.
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

from pdmesh.core.prefix_index import Delta
from pdmesh.errors import Unavailable
from pdmesh.kv import keys

_CHUNK: Final = 500  # blocks per pipeline: a few ms, so that the store stays responsive
_TIMEOUT_S: Final = 0.25


@dataclass(frozen=True, slots=True)
class StoredInstance:
    """What the store holds of one instance, up to its delta `sequence`."""

    incarnation: int
    sequence: int
    model_fingerprint: str
    blocks: frozenset[bytes]


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
        """The store's epoch; `proposed` becomes it if the store has none, as when it was wiped."""
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
            pipe.smembers(keys.instance_blocks(instance_id))
            version, blocks = await pipe.execute()
        with contextlib.suppress(KeyError, ValueError):
            return StoredInstance(
                int(version[b"incarnation"]),
                int(version[b"sequence"]),
                version[b"fingerprint"].decode(),
                frozenset(blocks),
            )
        return None

    async def apply(self, delta: Delta, model_fingerprint: str) -> None:
        """Add a delta to what the store has of this incarnation, in one transaction. Not for cleared ones."""
        assert not delta.is_cleared
        async with self._answering(), self._redis.pipeline(transaction=True) as pipe:
            _move(pipe, delta.instance_id, model_fingerprint, delta.removed, delta.stored)
            _set_version(
                pipe, delta.instance_id, delta.incarnation, delta.sequence, model_fingerprint
            )
            await pipe.execute()

    async def replace(self, instance_id: str, instance: StoredInstance) -> None:
        """Make the store hold exactly this of the instance. Costs the difference."""
        async with self._answering():
            known = await self._known_blocks(instance_id)
            before = await self._redis.hget(keys.instance_version(instance_id), "fingerprint")
            if before is not None and before.decode() != instance.model_fingerprint:
                await self.remove(instance_id)
                known = frozenset()
            fingerprint = instance.model_fingerprint
            version = keys.instance_version(instance_id)
            # The fingerprint stays: whoever removes a half-written instance needs it to find the blocks.
            await self._redis.hdel(version, "incarnation", "sequence")
            await self._redis.hset(version, mapping={"fingerprint": fingerprint})
            for chunk in _chunks(known - instance.blocks):
                await self._move(instance_id, fingerprint, chunk, ())
            # All of them, not only the new: after a wipe the reverse key may be back before the blocks.
            for chunk in _chunks(instance.blocks):
                await self._move(instance_id, fingerprint, (), chunk)
            async with self._redis.pipeline(transaction=True) as pipe:
                _set_version(
                    pipe, instance_id, instance.incarnation, instance.sequence, fingerprint
                )
                await pipe.execute()

    async def remove(self, instance_id: str) -> None:
        """Forget an instance. Costs its blocks."""
        async with self._answering():
            value = await self._redis.hget(keys.instance_version(instance_id), "fingerprint")
            fingerprint = value.decode() if value else ""
            for chunk in _chunks(await self._known_blocks(instance_id)):
                await self._move(instance_id, fingerprint, chunk, ())
            async with self._redis.pipeline(transaction=True) as pipe:
                pipe.delete(keys.instance_blocks(instance_id), keys.instance_version(instance_id))
                pipe.srem(keys.INSTANCES, instance_id)
                await pipe.execute()

    async def match(self, model_fingerprint: str, block_hashes: Sequence[bytes]) -> dict[str, int]:
        """Contiguous blocks from the start per instance, in one round trip."""
        async with self._answering(), self._redis.pipeline(transaction=False) as pipe:
            for block_hash in block_hashes:
                pipe.smembers(keys.block(model_fingerprint, block_hash))
            holders = await pipe.execute()
        matches: dict[str, int] = {}
        for position, members in enumerate(holders):
            for member in members:
                name = member.decode()
                if matches.get(name, 0) == position:
                    matches[name] = position + 1
        return matches

    async def _known_blocks(self, instance_id: str) -> frozenset[bytes]:
        return frozenset(await self._redis.smembers(keys.instance_blocks(instance_id)))

    async def _move(
        self,
        instance_id: str,
        model_fingerprint: str,
        removed: Sequence[bytes],
        stored: Sequence[bytes],
    ) -> None:
        async with self._redis.pipeline(transaction=True) as pipe:
            _move(pipe, instance_id, model_fingerprint, removed, stored)
            await pipe.execute()

    @contextlib.asynccontextmanager
    async def _answering(self) -> AsyncIterator[None]:
        try:
            yield
        except (RedisError, OSError, TimeoutError) as exc:
            raise Unavailable(f"Redis: {exc or type(exc).__name__}") from exc


def _move(
    pipe: Any,
    instance_id: str,
    model_fingerprint: str,
    removed: Sequence[bytes],
    stored: Sequence[bytes],
) -> None:
    for block_hash in removed:
        pipe.srem(keys.block(model_fingerprint, block_hash), instance_id)
    for block_hash in stored:
        pipe.sadd(keys.block(model_fingerprint, block_hash), instance_id)
    if removed:
        pipe.srem(keys.instance_blocks(instance_id), *removed)
    if stored:
        pipe.sadd(keys.instance_blocks(instance_id), *stored)
    pipe.sadd(keys.INSTANCES, instance_id)


def _set_version(
    pipe: Any, instance_id: str, incarnation: int, sequence: int, model_fingerprint: str
) -> None:
    fields = {"incarnation": incarnation, "sequence": sequence, "fingerprint": model_fingerprint}
    pipe.hset(keys.instance_version(instance_id), mapping=fields)


def _chunks(blocks: Collection[bytes]) -> Iterator[list[bytes]]:
    iterator = iter(sorted(blocks))
    while chunk := list(islice(iterator, _CHUNK)):
        yield chunk
