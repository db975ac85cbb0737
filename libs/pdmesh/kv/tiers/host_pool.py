"""A pool of KV blocks in host memory, below the engine's own blocks (S68, S76).

The memory is one arena, mapped at the start. A slot holds all layers of one block.
`core.kv.tiers.pool_eviction` decides, under one lock, which block gets which slot. Bytes are copied
without the lock. This is safe because only one thread writes to a reserved slot, and because a
block is pinned while it is read.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pdmesh.core.instance.arena import ArenaRange
from pdmesh.core.kv.tiers.pool_eviction import PoolBook
from pdmesh.core.kv.tiers.session_holds import SessionState
from pdmesh.kv.tiers.file_format import checksum_of
from pdmesh.kv.tiers.pool_memory import PopulatedArena
from pdmesh.kv.transport.base import ByteArray

_ALIGN = 4096


@dataclass(frozen=True, slots=True)
class PinnedBlock:
    """A block that stays in its slot until it is unpinned."""

    name: bytes
    data: ByteArray
    checksum: bytes
    owner: bytes


class HostPool:
    """The pool of one rank. `block_bytes` is the size of a block over all layers of the rank.

    All methods may be called from any thread.
    """

    def __init__(self, pool_bytes: int, block_bytes: int, *, owner_share: float = 1.0) -> None:
        self.block_bytes = block_bytes
        self._stride = -(-block_bytes // _ALIGN) * _ALIGN
        num_slots = pool_bytes // self._stride
        self._book = PoolBook(num_slots, owner_share)
        self._arena = PopulatedArena(num_slots * self._stride)
        self._checksums: list[bytes] = [b""] * num_slots
        self._owners: list[bytes] = [b""] * num_slots
        self._lock = threading.Lock()

    @property
    def num_slots(self) -> int:
        return self._book.num_slots

    @property
    def num_blocks(self) -> int:
        return len(self._book)

    @property
    def num_pinned(self) -> int:
        with self._lock:
            return self._book.num_pinned

    @property
    def num_evicted(self) -> int:
        return self._book.num_evicted

    def held(self, names: Sequence[bytes]) -> int:
        """A mask of the positions in `names` whose blocks are in the pool."""
        with self._lock:
            return self._book.held(names)

    def names(self) -> list[bytes]:
        with self._lock:
            return self._book.names()

    def put(
        self, name: bytes, owner: bytes, write: Callable[[ByteArray], None], checksum: bytes = b""
    ) -> bool:
        """Let `write` fill a slot, and add the block to the pool.

        Returns False if the block is already here or if there is no room. If `write` raises, the
        block is not stored, and the exception is passed on. Pass `checksum` if it is known.
        """
        slot = self.reserve(name, owner)
        if slot is None:
            return False
        try:
            write(slot)
        except BaseException:
            self.abandon(name)
            raise
        self.commit(name, slot, checksum or checksum_of(slot))
        return True

    def reserve(self, name: bytes, owner: bytes) -> ByteArray | None:
        """Reserve a slot and return its bytes. Write the block there, then `commit` or `abandon`.

        Returns None if the block is already here or if there is no room.
        """
        with self._lock:
            slot = self._book.reserve(name, owner)
            if slot is None:
                return None
            self._owners[slot] = owner
        return self._view(slot)

    def commit(
        self, name: bytes, data: ByteArray, checksum: bytes, is_pinned: bool = False
    ) -> None:
        """Add a reserved block to the pool. Its bytes are complete and have this checksum.

        `is_pinned` also pins the block, as `pin` does.
        """
        with self._lock:
            self._book.commit(name)
            self._checksums[self._book.slot(name)] = checksum
            if is_pinned:
                self._book.pin(name)

    def abandon(self, name: bytes) -> None:
        with self._lock:
            self._book.abandon(name)

    def pin(self, names: Sequence[bytes]) -> list[PinnedBlock]:
        """Pin the blocks of `names` up to the first that is not here. Unpin each of them once."""
        pinned: list[PinnedBlock] = []
        with self._lock:
            for name in names:
                slot = self._book.pin(name)
                if slot is None:
                    break
                pinned.append(
                    PinnedBlock(name, self._view(slot), self._checksums[slot], self._owners[slot])
                )
        return pinned

    def unpin(self, names: Sequence[bytes], is_use: bool = True) -> None:
        """Unpin blocks in reverse order, so that a prompt's end is evicted before its beginning.

        `is_use` means that the blocks served a request, and so should be evicted late.
        """
        with self._lock:
            for name in reversed(names):
                self._book.unpin(name, is_use)

    def touch(self, names: Sequence[bytes]) -> None:
        with self._lock:
            self._book.touch(names)

    @property
    def num_fixed(self) -> int:
        return self._book.num_fixed

    def fix(self, names: Sequence[bytes]) -> None:
        """Never evict these blocks, which an operator has pinned, once they are in the pool.

        Each call replaces the blocks of the last call. Fixed blocks may fill only a share of the
        pool.
        """
        with self._lock:
            self._book.fix(names)

    def note_session(
        self, state: SessionState, session: str, owner: bytes, names: Sequence[bytes], until: float
    ) -> None:
        """Hold, release or retire a session's blocks (`PoolBook.hold`, `resume`, `retire`).

        While a session is paused, its held blocks are evicted last. A hold ends at `until`.
        """
        with self._lock:
            match state:
                case SessionState.PAUSED_FOR_TOOL:
                    self._book.hold(session, owner, names, until)
                case SessionState.RESUMED:
                    self._book.resume(session)
                case SessionState.DONE:
                    self._book.retire(session, names)

    def end_holds(self, now: float) -> None:
        with self._lock:
            self._book.end_holds(now)

    @property
    def num_held(self) -> int:
        return self._book.num_held

    def take_kept(self) -> list[tuple[bytes, bytes]]:
        """(name, owner) of each block that the pool began to keep since the last call.

        The pool keeps blocks that many requests use: it does not evict them.
        """
        with self._lock:
            names = self._book.take_kept()
            return [(name, self._owners[self._book.slot(name)]) for name in names]

    def forget(self, name: bytes) -> None:
        """Remove a block, for example because its bytes are bad."""
        with self._lock:
            self._book.forget(name)

    def clear(self) -> None:
        with self._lock:
            for name in self._book.names():
                self._book.forget(name)

    def take_changes(self) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
        """The names of the blocks (stored, removed) since the last call."""
        with self._lock:
            return self._book.take_changes()

    def check_invariants(self) -> None:
        with self._lock:
            self._book.check_invariants()

    def close(self) -> None:
        self._arena.close()

    def _view(self, slot: int) -> ByteArray:
        return self._arena.view(ArenaRange(slot * self._stride, self.block_bytes))


def is_intact(block: PinnedBlock) -> bool:
    return checksum_of(block.data) == block.checksum
