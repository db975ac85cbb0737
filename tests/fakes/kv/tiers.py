"""Blocks, pools, and slow or broken lower tiers, for tests of tiers.

A tier is a place for KV below the engine: the host pool, peers' pools, or files.
"""

from __future__ import annotations

import asyncio
import errno
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from pdmesh.core.kv.tier import Tier
from pdmesh.core.kv.tiers.load_plan import Cost, CostBook
from pdmesh.kv.tiers.file_format import checksum_of, identity_of
from pdmesh.kv.tiers.file_store import FileStore
from pdmesh.kv.tiers.file_tier import FileTier
from pdmesh.kv.tiers.host_pool import HostPool
from pdmesh.kv.tiers.peers import PeerHolding, PeerPools
from pdmesh.kv.tiers.report import TierCounts
from pdmesh.kv.tiers.stack import TierStack
from pdmesh.kv.transport.base import ByteArray

BLOCK_BYTES = 5000
SLOT_BYTES = 8192
OWNER = b"\x01" * 8


def name_of(key: int) -> bytes:
    return key.to_bytes(16, "big")


def names_of(*keys: int) -> list[bytes]:
    return [name_of(key) for key in keys]


def data_of(name: bytes) -> ByteArray:
    seed = int.from_bytes(name, "big")
    return np.random.default_rng(seed).integers(0, 256, BLOCK_BYTES, np.uint8)


def fill(pool: HostPool, names: Sequence[bytes]) -> None:
    """Put blocks into the pool, as an engine does after it has computed them."""
    for name in names:

        def write(out: ByteArray, name: bytes = name) -> None:
            out[:] = data_of(name)

        assert pool.put(name, OWNER, write)


@dataclass
class FakePeer(PeerPools):
    """A peer that holds the blocks `names`.

    A lookup takes `lookup_s`, and a load takes `delay_s`.
    """

    names: list[bytes]
    delay_s: float = 0.0
    lookup_s: float = 0.0
    num_asked: int = 0
    # Blocks that the peer has evicted after it reported them.
    has_lost: set[bytes] = field(default_factory=set)

    async def find(self, names: Sequence[bytes], first: int) -> Sequence[PeerHolding]:
        await asyncio.sleep(self.lookup_s)
        held = [i for i, name in enumerate(names) if i >= first and name in self.names]
        return [PeerHolding("decode-1", 1, ("nowhere",), held[0], len(held))] if held else []

    async def load(
        self, peer: PeerHolding, names: Sequence[bytes], targets: Sequence[ByteArray]
    ) -> Sequence[bytes]:
        self.num_asked += 1
        await asyncio.sleep(self.delay_s)
        checksums: list[bytes] = []
        for name, target in zip(names, targets, strict=True):
            if name in self.has_lost:
                break
            target[:] = data_of(name)
            checksums.append(checksum_of(target))
        return checksums


class SlowStore(FileStore):
    """Delays each read by `read_s`. Calls `on_read` before reads and `on_lookup` before lookups."""

    read_s = 0.0
    on_read: Callable[[], object] = staticmethod(lambda: None)
    on_lookup: Callable[[], object] = staticmethod(lambda: None)
    num_read = 0
    is_broken = False

    def contains(
        self, names: Sequence[bytes], owner: bytes, is_given_up: threading.Event | None = None
    ) -> int:
        self.on_lookup()
        return super().contains(names, owner, is_given_up)

    def get(self, name: bytes, owner: bytes, out: ByteArray) -> bytes | None:
        self.num_read += 1
        self.on_read()
        time.sleep(self.read_s)
        if self.is_broken:
            raise OSError(errno.EIO, "Input/output error")
        return super().get(name, owner, out)


@dataclass
class Clock:
    """The monotonic clock, which a test can move ahead."""

    skipped_s: float = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.skipped_s


@dataclass
class Rig:
    clock: Clock
    pool: HostPool
    store: SlowStore
    files: FileTier
    stack: TierStack
    counts: TierCounts


def rig(
    folder: Path,
    num_slots: int = 16,
    peers: PeerPools | None = None,
    quota: int = 1 << 30,
    lookup_s: float = 30.0,
) -> Rig:
    """Tiers whose plans load all the blocks they can.

    Computing is expensive here, and lookups may take long.
    """
    pool = HostPool(num_slots * SLOT_BYTES, BLOCK_BYTES)
    identity = identity_of("model", 0, 1)
    store = SlowStore(folder, identity, BLOCK_BYTES, quota, time.time)
    counts, clock = TierCounts(), Clock()
    files = FileTier(store, pool, counts, clock)
    costs = CostBook({tier: Cost(0.0, 0.001) for tier in Tier}, recompute_block_s=10.0)
    costs.costs[Tier.HOST] = Cost(0.0, 0.0)
    stack = TierStack(pool, counts, clock, files=files, costs=costs, lookup_s=lookup_s)
    stack.peers = peers
    return Rig(clock, pool, store, files, stack, counts)
