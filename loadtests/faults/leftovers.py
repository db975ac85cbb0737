"""What processes may leave behind outside of themselves: shared memory, keys that never expire,
consumers of streams.

Only what this mesh's own processes map, write or open counts: other programs run here, too.
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
    """The shared memory that the process maps: files in /dev/shm by path, SysV as `sysv:<id>`."""
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
    """Which names of `shared_memory` still exist, mapped or not."""
    segments = {line.split()[1] for line in _SYSV_TABLE.read_text().splitlines()[1:]}
    return {
        name
        for name in names
        if (name[5:] in segments if name.startswith("sysv:") else Path(name).exists())
    }


async def lasting_keys(redis_url: str, instance_ids: Iterable[str]) -> int:
    """How many Redis keys have no expiry and are not the index's for these instances."""
    known = {keys.INSTANCES, keys.EPOCH}
    for name in instance_ids:
        known |= {keys.instance_version(name), *(keys.instance_blocks(name, t) for t in Tier)}
    redis: Any = Redis.from_url(redis_url)  # any: redis-py's generic client
    num = 0
    try:
        async for key in redis.scan_iter(count=_SCAN):
            num += key.decode() not in known and await redis.pttl(key) < 0
    finally:
        await redis.aclose()
    return num


async def num_consumers(nats_url: str) -> int:
    """The consumers of all streams together; a watch of a bucket is one consumer."""
    client = await nats.connect(nats_url)
    try:
        return sum(s.state.consumer_count for s in await client.jetstream().streams_info())
    finally:
        await client.close()
