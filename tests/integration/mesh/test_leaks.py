"""Runs the leak test of `make bench NAME=leak` with few requests instead of 100,000, and tests that
it detects leaks.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import nats
import pytest
from redis.asyncio import Redis

from loadtests.faults.leak import leak_mesh, leak_test
from loadtests.faults.leftovers import (
    lasting_keys,
    num_consumers,
    shared_memory,
    still_there,
)
from pdmesh.core.kv.prefix.prefix_index import IndexDelta
from pdmesh.kv.index.redis_index import RedisIndex
from tests.support.sites import servers


@pytest.mark.req("S52", "S78")
@pytest.mark.fault("F2", "F6", "F27")
@pytest.mark.timeout(300)
async def test_nothing_is_left_after_disconnects_and_kills(tmp_path: Path) -> None:
    async with leak_mesh(tmp_path) as mesh:
        report = await leak_test(mesh, count=1000, concurrency=24, kill_every=100, seed=3)
    assert report.leaks == []
    assert report.num_kills >= 1
    assert report.num_given_up > 200
    assert report.outcomes["done"] > 300
    assert not report.outcomes.keys() & {"hung", "refused"}
    assert min(report.tiers[f"host {event}"] for event in ("served", "stored")) > 0
    assert report.tiers["file stored"] > 0
    assert report.outside["NATS consumers"][0] > 0


@contextmanager
def posix_segment() -> Iterator[str]:
    segment = SharedMemory(create=True, size=4096)
    try:
        yield f"/dev/shm/{segment.name}"
    finally:
        segment.close()
        segment.unlink()


@contextmanager
def sysv_segment() -> Iterator[str]:
    libc = ctypes.CDLL(None)
    libc.shmat.restype = ctypes.c_void_p
    number = libc.shmget(0, ctypes.c_size_t(4096), 0o1600)  # a new private segment
    at = libc.shmat(number, None, 0)
    try:
        yield f"sysv:{number}"
    finally:
        libc.shmdt(ctypes.c_void_p(at))
        libc.shmctl(number, 0, None)  # IPC_RMID


@pytest.mark.parametrize("made", [posix_segment, sysv_segment])
def test_leaked_shared_memory_is_detected_until_it_is_removed(made: Any) -> None:
    """`made` makes a segment of shared memory, by the POSIX or the System V calls."""
    with made() as name:
        assert name in shared_memory(os.getpid())
        assert still_there({name, "sysv:999999999", "/dev/shm/none"}) == {name}
    assert name not in shared_memory(os.getpid())
    assert still_there({name}) == set()


async def test_leaked_redis_keys_are_detected(tmp_path: Path) -> None:
    server = servers.valkey(tmp_path)
    await server.start()
    redis: Any = Redis.from_url(server.url)  # the type of redis-py's client is generic
    index = RedisIndex(server.url, timeout_s=5.0)
    try:
        await index.epoch("e")
        for instance_id in ("p0", "p1"):
            await index.apply(IndexDelta(instance_id, 1, 1, stored=[b"a" * 16, b"b" * 16]))
        await redis.set("soon gone", 1, ex=1000)
        assert await lasting_keys(server.url, ["p0", "p1"]) == 0
        assert await lasting_keys(server.url, ["p0"]) == 2, "the version and blocks of p1"
    finally:
        await index.close()
        await redis.aclose()
        server.close()


async def test_consumers_of_streams_are_counted(tmp_path: Path) -> None:
    server = servers.nats(tmp_path)
    await server.start()
    client = await nats.connect(server.url)
    try:
        stream = client.jetstream()
        await stream.add_stream(name="s", subjects=["s.>"])
        assert await num_consumers(server.url) == 0
        await stream.subscribe("s.one")
        assert await num_consumers(server.url) == 1
    finally:
        await client.close()
        server.close()
