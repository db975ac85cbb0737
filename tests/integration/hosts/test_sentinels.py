"""Tests a Redis with replicas and sentinels. Clients must follow the primary, with the same TLS and
users as without sentinels.
"""

from __future__ import annotations

from typing import Any

import pytest
from redis.asyncio import ConnectionPool, Redis
from redis.exceptions import NoPermissionError, RedisError

from pdmesh.errors import Unavailable
from pdmesh.kv.index.redis_index import RedisIndex, StoredInstance
from pdmesh.kv.index.redis_keys import instance_version
from pdmesh.net.redis_pool import pool_of
from pdmesh.net.tls.own_certificate import using_certificates
from tests.integration.hosts.conftest import HOSTS, PRIMARY, RedisTrio
from tests.support.sites.certificates import TestAuthority
from tests.support.sites.servers import TestServer
from tests.support.waiting import until

STORED = StoredInstance(7, 1, frozenset({b"x"}), frozenset())


async def _epoch(index: RedisIndex) -> str:
    """The epoch of the index, or an empty text while no primary accepts writes."""
    try:
        return await index.epoch("e")
    except Unavailable:
        return ""


@pytest.mark.fault("F14", "F16")
async def test_the_index_follows_the_primary_and_takes_another_one_for_another_store(
    redis_trio: RedisTrio, ours: TestAuthority
) -> None:
    with using_certificates(ours.folder("kv-cache-index", "i")):
        index = RedisIndex(redis_trio.url("kv-cache-index"), 5.0)
        await until(lambda: _epoch(index))
        before = await index.epoch("f")
        assert before == f"e@{HOSTS['a']}:{redis_trio.ports[0]}"
        await index.replace("p", STORED)
        assert await index.load("p") == STORED
        redis_trio.servers["a"].pause()
        await until(lambda: _has_other_epoch(index, before))
        # The last writes may be lost, so the test writes all data again.
        await index.replace("p", STORED)
        assert await index.load("p") == STORED
        redis_trio.servers["a"].resume()
        await index.close()


async def _has_other_epoch(index: RedisIndex, before: str) -> bool:
    return await _epoch(index) not in ("", before)


@pytest.mark.fault("F14")
async def test_a_primary_that_returns_at_once_has_kept_what_it_had(
    redis_trio: RedisTrio, ours: TestAuthority
) -> None:
    """A primary that returns at once must return with its data. If it came back empty, it would
    also empty its replicas.
    """
    with using_certificates(ours.folder("kv-cache-index", "i")):
        index = RedisIndex(redis_trio.url("kv-cache-index"), 5.0)
        await until(lambda: _epoch(index))
        await index.replace("p", STORED)
        await until(lambda: _has_written(redis_trio.servers["a"], instance_version("p")))
        redis_trio.servers["a"].kill()
        await redis_trio.servers["a"].start()
        await until(lambda: _epoch(index))
        assert await index.load("p") == STORED
        await index.close()


def _has_written(server: TestServer, key: str) -> bool:
    """Whether the server's append-only file contains this key."""
    files = (server.directory / "appendonlydir").glob("*.aof")
    return any(key.encode() in file.read_bytes() for file in files)


async def test_a_service_may_only_look_for_the_primary_at_a_sentinel(
    redis_trio: RedisTrio, ours: TestAuthority
) -> None:
    folder = ours.folder("gateway", "g")
    with using_certificates(folder):
        for user, password in (("gateway", "wrong"), (None, None)):
            with pytest.raises(RedisError):
                async with _sentinel(redis_trio, folder.path, user, password) as stranger:
                    await stranger.ping()
        sentinel = _sentinel(redis_trio, folder.path, "gateway", redis_trio.passwords["gateway"])
        found = await sentinel.execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", PRIMARY)
        assert found == [HOSTS["a"].encode(), str(redis_trio.ports[0]).encode()]
        for command in (
            ("SENTINEL", "FAILOVER", PRIMARY), ("SENTINEL", "REMOVE", PRIMARY), ("SHUTDOWN",),
            ("SENTINEL", "SET", PRIMARY, "quorum", "1"),
            ("SENTINEL", "CONFIG", "SET", "announce-ip", "x"),
        ):  # fmt: skip
            with pytest.raises(NoPermissionError):
                await sentinel.execute_command(*command)
        await sentinel.aclose()


def _sentinel(trio: RedisTrio, tls: Any, user: str | None, password: str | None) -> Any:
    return Redis(
        host=HOSTS["a"],
        port=trio.ports[1],
        username=user,
        password=password,
        ssl=True,
        ssl_certfile=str(tls / "tls.crt"),
        ssl_keyfile=str(tls / "tls.key"),
        ssl_ca_certs=str(tls / "ca.crt"),
        driver_info=None,
    )


async def test_a_primary_that_no_sentinel_knows_is_not_reached(
    redis_trio: RedisTrio, ours: TestAuthority
) -> None:
    with using_certificates(ours.folder("gateway", "g")):
        url = redis_trio.url("gateway").replace(f"primary={PRIMARY}", "primary=other")
        pool = pool_of(ConnectionPool, url, socket_timeout=5.0, socket_connect_timeout=5.0)
        redis: Any = Redis.from_pool(pool)
        with pytest.raises(RedisError, match="no sentinel knows the primary of 'other'"):
            await redis.ping()
        await redis.aclose()
