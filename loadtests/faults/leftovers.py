"""Finds what processes leave behind outside of themselves.

These are shared memory, keys in Redis that never expire, and consumers of NATS streams. Other
programs run on the machine as well. So only what this mesh's own processes map, write or open is
counted.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import nats
from redis.asyncio import Redis

from pdmesh.core.kv.tier import Tier
from pdmesh.kv.index import redis_keys as keys

_SYSV_TABLE: Final = Path("/proc/sysvipc/shm")
_SCAN: Final = 1000


def shared_memory(pid: int) -> set[str]:
    """The shared memory that the process maps: the path of a file in /dev/shm, or `sysv:<id>`."""
    found: set[str] = set()
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        _, _, _, _, inode, *path = line.split(maxsplit=5)
        name = path[0].removesuffix(" (deleted)") if path else ""
        if name.startswith("/SYSV"):
            found.add(f"sysv:{inode}")
        elif name.startswith("/dev/shm/"):
            found.add(name)
    return found


def still_there(names: Iterable[str]) -> set[str]:
    """The names from `shared_memory` that still exist, whether a process maps them or not."""
    segments = {line.split()[1] for line in _SYSV_TABLE.read_text().splitlines()[1:]}
    return {
        name
        for name in names
        if (name[5:] in segments if name.startswith("sysv:") else Path(name).exists())
    }


async def lasting_keys(redis_url: str, instance_ids: Iterable[str]) -> int:
    """How many Redis keys never expire.

    The prefix index's keys are not counted, unless they belong to another instance than these.
    """
    known = {keys.INSTANCES, keys.EPOCH}
    for name in instance_ids:
        known |= {keys.instance_version(name), *(keys.instance_blocks(name, t) for t in Tier)}
    redis: Any = Redis.from_url(redis_url)  # the type is Any because redis-py's client is generic
    num = 0
    try:
        async for key in redis.scan_iter(count=_SCAN):
            num += key.decode() not in known and await redis.pttl(key) < 0
    finally:
        await redis.aclose()
    return num


async def num_consumers(nats_url: str) -> int:
    """The number of consumers of all streams. Each watch of a bucket is a consumer."""
    client = await nats.connect(nats_url)
    try:
        return sum(s.state.consumer_count for s in await client.jetstream().streams_info())
    finally:
        await client.close()
