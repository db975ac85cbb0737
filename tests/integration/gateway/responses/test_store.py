"""Kept responses in a real Valkey: bounds, tenants, and a server that goes away."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from redis.asyncio import Redis

from pdmesh.errors import Unavailable
from pdmesh.services.gateway.http.responses import store as store_module
from pdmesh.services.gateway.http.responses.store import KeepBounds, ResponseStore
from tests.support.sites import servers

Make = Callable[..., ResponseStore]


@pytest.fixture
async def valkey(tmp_path: Path) -> AsyncIterator[servers.TestServer]:
    server = servers.valkey(tmp_path)
    await server.start()
    yield server
    server.close()


@pytest.fixture
async def make(valkey: servers.TestServer) -> AsyncIterator[Make]:
    made: list[ResponseStore] = []

    def store(ttl_s: float = 3600.0, max_count: int = 3, max_bytes: int = 1000) -> ResponseStore:
        made.append(ResponseStore(valkey.url, KeepBounds(ttl_s, max_count, max_bytes)))
        return made[-1]

    yield store
    for each in made:
        await each.close()


async def kept(store: ResponseStore, *names: str, tenant: str = "a") -> list[str]:
    return [name for name in names if await store.load(tenant, name) is not None]


async def test_the_oldest_make_room_within_the_count(make: Make) -> None:
    store = make()
    for name in "pqrst":
        assert await store.keep("a", name, name.encode())
    assert await kept(store, *"pqrst") == list("rst")
    assert await store.load("a", "t") == b"t"


async def test_the_oldest_make_room_within_the_bytes(make: Make) -> None:
    store = make(max_count=100)
    for name in "pqr":
        assert await store.keep("a", name, b"x" * 400)
    assert await kept(store, *"pqr") == ["q", "r"]
    assert await store.keep("a", "r", b"x" * 100), "kept again, it counts once"
    assert await store.keep("a", "s", b"x" * 500)
    assert await kept(store, *"pqrs") == ["q", "r", "s"]
    assert not await store.keep("a", "t", b"x" * 1001)
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


async def test_what_expired_counts_no_more_and_nothing_is_left(
    make: Make, valkey: servers.TestServer
) -> None:
    store = make(ttl_s=0.3, max_count=100)
    await store.keep("a", "p", b"x" * 900)
    while await store.load("a", "p") is not None:
        await asyncio.sleep(0.02)
    await store.keep("a", "q", b"x" * 900)
    redis = Redis.from_url(valkey.url)
    assert await redis.hgetall("pdmesh:v1:responses:{a}:sizes") == {b"": b"900", b"q": b"900"}
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
    assert not await store.keep("a", "q", b"x")
    with pytest.raises(Unavailable) as caught:
        await store.load("a", "p")
    assert caught.value.http_status == 503
    with pytest.raises(Unavailable):
        await store.forget("a", "p")
    await valkey.start() if loss == "kill" else valkey.resume()
    monkeypatch.setattr(store_module, "TIMEOUT_S", 60.0)
    deadline = time.monotonic() + 60
    while not await store.keep("a", "r", b"x"):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)
    assert await store.load("a", "r") == b"x"
    assert await store.load("a", "p") == (None if loss == "kill" else b"x")


async def test_one_that_keeps_nothing_connects_to_nothing() -> None:
    store = ResponseStore("redis://127.0.0.1:1", KeepBounds(1.0, 0, 65536))
    assert not store.keeps
    await store.close()


async def test_a_server_that_refuses_one_tenants_command_is_not_away_for_others(
    make: Make, valkey: servers.TestServer
) -> None:
    store = make()
    assert await store.keep("a", "p", b"x")
    redis = Redis.from_url(valkey.url)
    for key in await redis.keys("*{a}:sizes"):
        await redis.set(key, "of another type")
    assert not await store.keep("a", "q", b"x")
    assert await store.load("a", "p") == b"x"
    assert await store.keep("b", "q", b"x")
    await redis.aclose()
