"""What processes may leave behind outside of themselves: shared memory, keys that never expire,
consumers of streams.

Only what this mesh's own processes map, write or open is looked at: others run on the machine, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import nats
from redis.asyncio import Redis

from pdmesh.core.kv.tiers.load_plan import Tier
from pdmesh.kv.index import redis_keys as keys

_SYSV_TABLE: Final = Path("/proc/sysvipc/shm")
_BLOCK_KEY: Final = keys.block("", b"").rstrip(":").encode() + b":"
_SCAN: Final = 1000


def shared_memory(pid: int) -> set[str]:
    """What the process maps: files in /dev/shm by path, SysV segments as `sysv:<id>`."""
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
    """Those of `shared_memory` that exist, mapped or not."""
    segments = {line.split()[1] for line in _SYSV_TABLE.read_text().splitlines()[1:]}
    return {
        name
        for name in names
        if (name[5:] in segments if name.startswith("sysv:") else Path(name).exists())
    }


async def lasting_keys(redis_url: str, instance_ids: Iterable[str]) -> dict[str, int]:
    """Redis keys without an expiry, by kind: those of the index for these instances, and any other.

    A block's key belongs to them if one of them is in it; `block of nobody` is what no removal
    would find again.
    """
    known = set(instance_ids)
    owned = {
        key.encode()
        for i in known
        for key in (keys.instance_version(i), *(keys.instance_blocks(i, t) for t in Tier))
    }
    named = {keys.INSTANCES.encode(), keys.EPOCH.encode()}
    found: Counter[str] = Counter({"block of nobody": 0, "other": 0})
    redis: Any = Redis.from_url(redis_url)  # any: redis-py's generic client
    try:
        async for key in redis.scan_iter(count=_SCAN):
            if key in owned or key in named or await redis.pttl(key) >= 0:
                continue
            if not key.startswith(_BLOCK_KEY):
                found["other"] += 1
                continue
            holders = {m.decode().rpartition("/")[0] for m in await redis.smembers(key)}
            found["block of nobody"] += not holders & known
    finally:
        await redis.aclose()
    return dict(found)


async def num_consumers(nats_url: str) -> int:
    """Of all streams together; a watch of a bucket is one."""
    client = await nats.connect(nats_url)
    try:
        return sum(s.state.consumer_count for s in await client.jetstream().streams_info())
    finally:
        await client.close()
