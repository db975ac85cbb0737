"""The memory of a KV agent's arenas.

An arena is memory that is mapped and registered once, and from which ranges are reserved. The arena
of this module is one private anonymous mapping in host memory. The kernel commits each page when it
is first used. `kv.device.arena` has an `ArenaMemory` in a GPU's memory. The agent works with
either, because it only slices, sends, receives and checksums the ranges.
"""

from __future__ import annotations

import contextlib
import mmap
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from pdmesh.core.instance.arena import ArenaRange
from pdmesh.kv.agent.types import BlockSource
from pdmesh.kv.transport.base import ByteArray, KvBytes


class ArenaMemory(Protocol):
    """`size` contiguous bytes that the transport may read and write.

    `core.instance.arena` decides which bytes each leg (a request's stay on an instance) owns.
    """

    @property
    def size(self) -> int: ...

    def view(self, r: ArenaRange) -> KvBytes:
        """The bytes of a range, without a copy. Raises IndexError outside the arena."""
        ...

    def close(self) -> None: ...


class HostArena:
    """Page-aligned host memory."""

    def __init__(self, size: int) -> None:
        self._size = size
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        self._map = mmap.mmap(-1, max(size, mmap.PAGESIZE), flags=flags)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            # Huge pages make gather, checksum and scatter 5 to 20 % faster. Not every kernel
            # supports them.
            with contextlib.suppress(OSError):
                self._map.madvise(mmap.MADV_HUGEPAGE)
        self._bytes: ByteArray = np.frombuffer(self._map, np.uint8)

    @property
    def size(self) -> int:
        return self._size

    def view(self, r: ArenaRange) -> ByteArray:
        if r.offset < 0 or r.length < 0 or r.offset + r.length > self._size:
            raise IndexError(f"{r} is outside an arena of {self._size} bytes")
        return self._bytes[r.offset : r.offset + r.length]

    def close(self) -> None:
        """Release the mapping. The memory is unmapped when the last view is gone."""
        self._bytes = np.empty(0, np.uint8)


@dataclass(frozen=True, slots=True)
class AgentMemory:
    """An agent's memory: peers pull from `staging`, and the agent's own pulls write to `landing`.

    `blocks` is the pool that peers may fetch blocks from.
    """

    staging: ArenaMemory
    landing: ArenaMemory
    blocks: BlockSource | None = None


def host_memory(
    staging_bytes: int, landing_bytes: int, blocks: BlockSource | None = None
) -> AgentMemory:
    return AgentMemory(HostArena(staging_bytes), HostArena(landing_bytes), blocks)
