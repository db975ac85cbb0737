"""Keeps responses in Redis, each under its tenant, for a limited time and within bounds.

A response that cannot be kept is still sent to its client. A lookup raises Unavailable while Redis
is unreachable. A call to Redis takes one second at most. After a call without an answer, Redis is
not called for one second.

`keep_response.lua` runs in Redis. It decides which kept responses are deleted to make room for a
new response. The bound for all tenants together leaves room for the other data in Redis. If Redis
is full for another reason, no response is kept, but kept responses can be found and forgotten.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import structlog

from pdmesh.errors import Unavailable
from pdmesh.kv.index import redis_keys as keys
from pdmesh.net.redis_pool import pool_of
from pdmesh.telemetry import metrics, names

log = structlog.get_logger(__name__)

TIMEOUT_S: Final = 1.0
_AWAY_S: Final = 1.0
_MAX_CONNECTIONS: Final = 16
_MADE, _STOP = "made", "stop"  # the marks of a response that is being made, or must stop
_MADE_MS: Final = 10_000
_BYTES_EACH: Final = 512  # must be the same as in keep_response.lua
_HERE: Final = Path(__file__).parent

_kept = metrics.counter(
    names.GATEWAY_RESPONSES_KEPT,
    "Attempts to keep a response, by outcome: kept, too_large, full, away",
)
_evicted = metrics.counter(
    names.GATEWAY_RESPONSES_EVICTED, "Kept responses that made room for newer ones"
)
_lookups = metrics.counter(
    names.GATEWAY_RESPONSES_LOOKUPS, "Kept responses asked for, by outcome: found, missing, away"
)


class ResponseStoreFull(Unavailable):
    """Redis is out of memory."""

    default_reason = "RESPONSE_STORE_FULL"


class KeepOutcome(StrEnum):
    KEPT = "kept"
    TOO_LARGE = "too_large"
    FULL = "full"  # Redis is out of memory
    AWAY = "away"


@dataclass(frozen=True, slots=True)
class KeepBounds:
    """`max_count` and `max_bytes` limit each tenant. If `max_count` is 0, nothing is kept.

    `max_total_bytes` limits all tenants together. It includes the memory that Redis itself needs
    for each response.
    """

    ttl_s: float
    max_count: int
    max_bytes: int
    max_total_bytes: int


class ResponseStore:
    """The store connects when it is first used."""

    def __init__(self, url: str, bounds: KeepBounds) -> None:
        self._url = url
        self._bounds = bounds
        # The types are Any because redis-py's client and scripts are generic.
        self._redis: Any = None
        self._keep: Any = None
        self._forget: Any = None
        self._away_until = 0.0
        self._says_full_at = 0.0

    @property
    def keeps(self) -> bool:
        return self._bounds.max_count > 0

    async def keep(self, tenant: str, response_id: str, record: bytes) -> KeepOutcome:
        outcome = await self._kept_as(tenant, response_id, record)
        _kept.add(1, {"outcome": outcome})
        return outcome

    async def _kept_as(self, tenant: str, response_id: str, record: bytes) -> KeepOutcome:
        bounds = self._bounds
        if len(record) > min(bounds.max_bytes, bounds.max_total_bytes - _BYTES_EACH):
            return KeepOutcome.TOO_LARGE
        limits = (bounds.max_count, bounds.max_bytes, bounds.max_total_bytes)
        args = (*_args(tenant, response_id), tenant, record, round(bounds.ttl_s * 1000), *limits)
        is_kept = False
        try:
            async with self._answering():
                while not is_kept:  # a call frees only some room, so that Redis is blocked briefly
                    num_evicted, is_kept = await self._keep(_keys(tenant, response_id), args)
                    _evicted.add(num_evicted)
        except ResponseStoreFull:
            return KeepOutcome.FULL
        except Unavailable:
            return KeepOutcome.AWAY
        return KeepOutcome.KEPT

    async def load(self, tenant: str, response_id: str) -> bytes | None:
        """A kept response. Raises Unavailable.

        None means that the response was never kept, is no longer kept, or is another tenant's.
        """
        async with self._counted(), self._answering():
            found = await self._redis.get(keys.kept_response(tenant, response_id))
        _lookups.add(1, {"outcome": "missing" if found is None else "found"})
        return None if found is None else bytes(found)

    async def forget(self, tenant: str, response_id: str) -> bool:
        """Forget a response, and return whether it was kept. Raises Unavailable."""
        async with self._counted(), self._answering():
            found = bool(await self._forget(_keys(tenant, response_id), _args(tenant, response_id)))
        _lookups.add(1, {"outcome": "found" if found else "missing"})
        return found

    # --- responses in the background -------------------------------------------------------------

    async def making(self, names: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
        """Mark the responses that this gateway makes, and return the names of those to stop.

        A name is (tenant, response). A mark expires after 10 s. Raises Unavailable.
        """
        async with self._answering(), self._pipeline() as pipe:
            for name in names:
                pipe.set(keys.kept_mark(*name, _MADE), b"1", px=_MADE_MS)
                pipe.get(keys.kept_mark(*name, _STOP))
            found = await pipe.execute()
        return [name for name, stop in zip(names, found[1::2], strict=True) if stop]

    async def made(self, tenant: str, response_id: str) -> None:
        """Remove the marks of a response that is no longer being made. Raises Unavailable."""
        marks = (keys.kept_mark(tenant, response_id, mark) for mark in (_MADE, _STOP))
        async with self._answering():
            await self._redis.unlink(*marks)

    async def is_made(self, tenant: str, response_id: str) -> bool:
        """Whether a living gateway is making the response. Raises Unavailable."""
        async with self._answering():
            return bool(await self._redis.exists(keys.kept_mark(tenant, response_id, _MADE)))

    async def ask_to_stop(self, tenant: str, response_id: str) -> None:
        """Raises Unavailable."""
        async with self._answering():
            stop = keys.kept_mark(tenant, response_id, _STOP)
            await self._redis.set(stop, b"1", px=_MADE_MS)

    def _pipeline(self) -> Any:
        self._connect()
        return self._redis.pipeline(transaction=False)

    async def close(self) -> None:
        if self._redis is not None:
            with contextlib.suppress(Exception):  # Redis may be unreachable
                await self._redis.aclose()

    @contextlib.asynccontextmanager
    async def _counted(self) -> AsyncIterator[None]:
        try:
            yield
        except Unavailable:
            _lookups.add(1, {"outcome": "away"})
            raise

    @contextlib.asynccontextmanager
    async def _answering(self) -> AsyncIterator[None]:
        if time.monotonic() < self._away_until:
            raise Unavailable("the store of responses does not answer")
        # A gateway that keeps no responses does not need the library.
        from redis.exceptions import OutOfMemoryError, RedisError, ResponseError

        self._connect()
        try:
            async with asyncio.timeout(TIMEOUT_S):
                yield
        except OutOfMemoryError as exc:
            if (now := time.monotonic()) >= self._says_full_at:
                self._says_full_at = now + _AWAY_S
                log.warning("responses.store_full", reason=str(exc))
            raise ResponseStoreFull("the Redis that keeps responses is full") from exc
        except ResponseError as exc:  # Redis refuses this command, but may accept others
            log.warning("responses.store_refused", reason=str(exc))
            raise Unavailable("the store of responses refused this") from exc
        except (RedisError, OSError, TimeoutError) as exc:
            self._away_until = time.monotonic() + _AWAY_S
            log.warning("responses.store_away", reason=str(exc) or type(exc).__name__)
            raise Unavailable("the store of responses does not answer") from exc

    def _connect(self) -> None:
        if self._redis is not None:
            return
        from redis.asyncio import BlockingConnectionPool, Redis
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff

        pool = pool_of(
            BlockingConnectionPool,
            self._url,
            max_connections=_MAX_CONNECTIONS,
            timeout=TIMEOUT_S,
            socket_timeout=TIMEOUT_S,
            socket_connect_timeout=TIMEOUT_S,
            retry=Retry(NoBackoff(), 0),
            client_name="pdmesh-gateway",
        )
        self._redis = Redis.from_pool(pool)
        shared = (_HERE / "forgetting.lua").read_text()
        keep = (_HERE / "keep_response.lua").read_text()
        forget = (_HERE / "forget_response.lua").read_text()
        # A script that begins with `#!lua` is refused at once if Redis is out of memory. Without
        # this line, Redis would let the script write once it has deleted something.
        self._keep = self._redis.register_script(f"#!lua\n{shared}{keep}")
        self._forget = self._redis.register_script(f"#!lua flags=allow-oom\n{shared}{forget}")


def _keys(tenant: str, response_id: str) -> tuple[str, ...]:
    return (
        keys.kept_response(tenant, response_id),
        keys.kept_expiries(tenant),
        keys.KEPT_EXPIRIES,
        keys.KEPT_SIZES,
    )


def _args(tenant: str, response_id: str) -> tuple[str, str]:
    """The prefix of the keys of responses, and the response's name."""
    return keys.KEPT_RESPONSES, f"{tenant}:{response_id}"
