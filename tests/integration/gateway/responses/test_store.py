"""Tests how gateways keep responses in a real Valkey: limits, separate tenants, and outages of the
server.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from pdmesh.errors import Unavailable
from pdmesh.kv.index import redis_keys as keys
from pdmesh.services.gateway.http.responses import store as store_module
from pdmesh.services.gateway.http.responses.store import (
    KeepBounds,
    KeepOutcome,
    ResponseStore,
    ResponseStoreFull,
)
from tests.support.sites import servers

Make = Callable[..., ResponseStore]
KEPT = KeepOutcome.KEPT


@pytest.fixture
async def valkey(tmp_path: Path) -> AsyncIterator[servers.TestServer]:
    server = servers.valkey(tmp_path)
    await server.start()
    yield server
    server.close()


@pytest.fixture
async def make(valkey: servers.TestServer) -> AsyncIterator[Make]:
    made: list[ResponseStore] = []

    def store(
        ttl_s: float = 3600.0, max_count: int = 3, max_bytes: int = 1000, max_total: int = 1 << 20
    ) -> ResponseStore:
        made.append(ResponseStore(valkey.url, KeepBounds(ttl_s, max_count, max_bytes, max_total)))
        return made[-1]

    yield store
    for each in made:
        await each.close()


@pytest.fixture
async def redis(valkey: servers.TestServer) -> AsyncIterator[Any]:
    async with Redis.from_url(valkey.url) as client:
        yield client


async def kept(store: ResponseStore, *names: str, tenant: str = "a") -> list[str]:
    return [name for name in names if await store.load(tenant, name) is not None]


async def test_the_oldest_responses_make_room_within_the_maximum_count(make: Make) -> None:
    store = make()
    for name in "pqrst":
        assert await store.keep("a", name, name.encode()) is KEPT
    assert await kept(store, *"pqrst") == list("rst")
    assert await store.load("a", "t") == b"t"


async def test_the_oldest_responses_make_room_within_the_maximum_bytes(make: Make) -> None:
    store = make(max_count=100)
    for name in "pqr":
        assert await store.keep("a", name, b"x" * 400) is KEPT
    assert await kept(store, *"pqr") == ["q", "r"]
    assert await store.keep("a", "r", b"x" * 100) is KEPT, "kept again, it counts once"
    assert await store.keep("a", "s", b"x" * 500) is KEPT
    assert await kept(store, *"pqrs") == ["q", "r", "s"]
    assert await store.keep("a", "t", b"x" * 1001) is KeepOutcome.TOO_LARGE
    assert await kept(store, *"qrst") == ["q", "r", "s"]


async def test_a_tenant_has_bounds_and_names_of_its_own(make: Make) -> None:
    store = make()
    for name in "pqr":
        await store.keep("a", name, b"a")
        await store.keep("b", name, b"b")
    assert [await store.load(tenant, "p") for tenant in ("a", "b", "c")] == [b"a", b"b", None]
    assert not await store.forget("c", "p")
    assert await store.forget("a", "p")
    assert not await store.forget("a", "p")
    assert await kept(store, *"pqr") == ["q", "r"]
    assert await kept(store, *"pqr", tenant="b") == ["p", "q", "r"]


async def test_expired_responses_do_not_count_and_leave_nothing_behind(
    make: Make, valkey: servers.TestServer
) -> None:
    store = make(ttl_s=0.3, max_count=100)
    await store.keep("a", "p", b"x" * 900)
    while await store.load("a", "p") is not None:
        await asyncio.sleep(0.02)
    await store.keep("a", "q", b"x" * 900)
    redis = Redis.from_url(valkey.url)
    expected = {b"": b"900", b"a": b"900", b"a:q": b"900"}
    assert await redis.hgetall(keys.KEPT_SIZES) == expected
    while await redis.keys("*"):
        await asyncio.sleep(0.02)
    await redis.aclose()


async def test_gateways_share_what_is_kept(make: Make) -> None:
    await make().keep("a", "p", b"x")
    assert await make().load("a", "p") == b"x"


@pytest.mark.fault("F15")
@pytest.mark.parametrize("loss", ["kill", "pause"])
async def test_nothing_hangs_while_the_server_is_away(
    make: Make, valkey: servers.TestServer, loss: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make()
    await store.keep("a", "p", b"x")
    monkeypatch.setattr(store_module, "TIMEOUT_S", 0.2)
    valkey.kill() if loss == "kill" else valkey.pause()
    assert await store.keep("a", "q", b"x") is KeepOutcome.AWAY
    with pytest.raises(Unavailable) as caught:
        await store.load("a", "p")
    assert caught.value.http_status == 503
    with pytest.raises(Unavailable):
        await store.forget("a", "p")
    await valkey.start() if loss == "kill" else valkey.resume()
    monkeypatch.setattr(store_module, "TIMEOUT_S", 60.0)
    deadline = time.monotonic() + 60
    while await store.keep("a", "r", b"x") is not KEPT:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)
    assert await store.load("a", "r") == b"x"
    assert await store.load("a", "p") == (None if loss == "kill" else b"x")


async def test_a_store_that_keeps_nothing_does_not_connect() -> None:
    store = ResponseStore("redis://127.0.0.1:1", KeepBounds(1.0, 0, 65536, 65536))
    assert not store.keeps
    await store.close()


async def test_a_server_that_refuses_one_tenants_command_is_not_away_for_others(
    make: Make, valkey: servers.TestServer
) -> None:
    store = make()
    assert await store.keep("a", "p", b"x") is KEPT
    redis = Redis.from_url(valkey.url)
    for key in await redis.keys("*expiries:a"):
        await redis.set(key, "of another type")
    assert await store.keep("a", "q", b"x") is KeepOutcome.AWAY
    assert await store.load("a", "p") == b"x"
    assert await store.keep("b", "q", b"x") is KEPT
    await redis.aclose()


async def books(redis: Any) -> tuple[dict[str, int], dict[str, int]]:
    """The sizes that the store has recorded, and the true sizes."""
    said = {
        name.decode(): int(size) for name, size in (await redis.hgetall(keys.KEPT_SIZES)).items()
    }
    true: dict[str, int] = {}
    beginning = keys.KEPT_RESPONSES
    for key in await redis.keys(f"{beginning}*"):
        name = key.decode().removeprefix(beginning)
        for whose in (name, name.split(":")[0], ""):
            true[whose] = true.get(whose, 0) + await redis.strlen(key)
    return said, true


async def test_the_oldest_of_all_tenants_make_room_for_any(make: Make, redis: Any) -> None:
    """Each tenant is far below its own limit, but together they fill the shared limit."""
    store = make(max_count=100, max_bytes=4000, max_total=4 * (1000 + 512))
    for number, tenant in enumerate("abcdef"):
        assert await store.keep(tenant, f"p{number}", b"x" * 1000) is KEPT
        said, true = await books(redis)
        assert said == true
    names = [(tenant, f"p{number}") for number, tenant in enumerate("abcdef")]
    assert [n for n in names if await store.load(*n) is not None] == names[2:]
    assert await store.keep("a", "large", b"x" * 3000) is KEPT
    assert (await books(redis))[1] == {
        "": 4000,
        "a": 3000,
        "a:large": 3000,
        "f": 1000,
        "f:p5": 1000,
    }
    assert await store.keep("a", "larger", b"x" * (4 * 1512 - 511)) is KeepOutcome.TOO_LARGE


async def test_many_small_responses_make_room_for_a_large_one_in_steps(
    make: Make, redis: Any
) -> None:
    """The store removes the small responses in several calls, so that no call blocks Redis for
    long.
    """
    store = make(max_count=10_000, max_bytes=1 << 20, max_total=1200 * (1 + 512))
    for number in range(1200):
        assert await store.keep("a", f"p{number}", b"x") is KEPT
    before = await redis.info("commandstats")
    assert await store.keep("b", "large", b"x" * 600_000) is KEPT
    after = await redis.info("commandstats")
    calls = [stats["cmdstat_evalsha"]["calls"] for stats in (before, after)]
    assert calls[1] - calls[0] == 3
    said, true = await books(redis)
    assert said == true
    assert said["b:large"] == 600_000


async def test_the_sizes_are_exact_after_each_kind_of_removal(make: Make, redis: Any) -> None:
    short, store = make(ttl_s=0.3, max_count=100), make(max_count=3)
    for name in "pq":
        await short.keep("a", name, b"x" * 10)
    await store.keep("b", "p", b"x" * 100)
    while await redis.exists(keys.kept_response("a", "q")):
        await asyncio.sleep(0.02)
    assert await store.forget("b", "p")
    assert await books(redis) == ({}, {})
    for name in "pqrst":
        await store.keep("b", name, b"x" * 7)
    await store.keep("c", "p", b"x")
    assert await store.forget("b", "s")
    assert not await store.forget("b", "s")
    said, true = await books(redis)
    assert said == true == {"": 15, "b": 14, "b:r": 7, "b:t": 7, "c": 1, "c:p": 1}
    assert await redis.pttl(keys.KEPT_SIZES) > 1000, "the longest of the times"


async def test_a_full_server_keeps_nothing_new_and_loses_nothing(make: Make, redis: Any) -> None:
    """Redis refuses even a script that deletes data before it writes, because other data need the
    memory.
    """
    store = make(max_count=2)
    for name in "pq":
        assert await store.keep("a", name, b"x") is KEPT
    await redis.config_set("maxmemory", 1)
    assert await store.keep("a", "r", b"x") is KeepOutcome.FULL
    with pytest.raises(ResponseStoreFull) as caught:
        await store.making([("a", "r")])
    assert caught.value.http_status == 503
    assert await kept(store, *"pqr") == ["p", "q"]
    assert await store.forget("a", "p")
    await redis.config_set("maxmemory", 0)
    assert await store.keep("a", "r", b"x") is KEPT
    assert await kept(store, *"pqr") == ["q", "r"]
    said, true = await books(redis)
    assert said == true


async def test_the_counted_bytes_match_the_servers_memory(make: Make, redis: Any) -> None:
    """The smallest responses are the worst case, because the store's records of them take more
    memory than the responses.
    """
    store = make(max_count=10_000, max_bytes=1 << 24, max_total=1 << 24)
    await store.keep("a", "resp_" + "0" * 24, b"x")
    before = (await redis.info("memory"))["used_memory"]
    for number in range(4000):
        await store.keep("tenant-of-some-name", f"resp_{number:024x}", b"x" * 700)
    took = (await redis.info("memory"))["used_memory"] - before
    assert took < 4000 * (700 + 512)
