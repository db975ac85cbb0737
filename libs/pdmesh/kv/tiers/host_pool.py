"""Blocks in host memory: one arena mapped up front, one slot for all layers of a block (S68, S76).

The thread of the engine's step copies to and from slots at memory speed; other threads fill slots
from slower tiers.
`core.kv.tiers.pool_eviction` decides which block has which slot, under one lock. Bytes are copied
without the lock, into a slot that no other thread has or out of a slot that is pinned.
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
    """A block that stays in place until it is unpinned."""

    name: bytes
    data: ByteArray
    checksum: bytes
    owner: bytes


class HostPool:
    """`block_bytes` is one block over all layers of the rank.

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
        """Mask of the positions whose block is here."""
        with self._lock:
            return self._book.held(names)

    def names(self) -> list[bytes]:
        with self._lock:
            return self._book.names()

    def put(
        self, name: bytes, owner: bytes, write: Callable[[ByteArray], None], checksum: bytes = b""
    ) -> bool:
        """Let `write` fill a slot; from then on the block is found.

        False: the block is already here, or there is no room. If `write` raises, the block is not
        stored, and the exception is passed on. Give `checksum` if it is known.
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
        """The bytes to write the block to, before `commit` or `abandon`.

        None: the block is already here, or there is no room.
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
        """The bytes that `reserve` returned now hold the block, with this checksum.

        `is_pinned`: also pin the block, as `pin` does.
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
        """The longest prefix of `names` that is here; unpin each block once."""
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
        """In reverse order, so that the end of a prompt is evicted before its beginning."""
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
        """Never evict these blocks once they are here, as far as the pool allows.

        They replace the blocks of the last call.
        """
        with self._lock:
            self._book.fix(names)

    def note_session(
        self, state: SessionState, session: str, owner: bytes, names: Sequence[bytes], until: float
    ) -> None:
        """See `PoolBook.hold`, `resume`, `retire`. `until`: when a paused session's hold ends."""
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
        """(name, owner) of blocks kept since the last call because many requests use them."""
        with self._lock:
            names = self._book.take_kept()
            return [(name, self._owners[self._book.slot(name)]) for name in names]

    def forget(self, name: bytes) -> None:
        """The block is bad or unwanted, and is not found from now on."""
        with self._lock:
            self._book.forget(name)

    def clear(self) -> None:
        with self._lock:
            for name in self._book.names():
                self._book.forget(name)

    def take_changes(self) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
        """(stored, removed) since the last call."""
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
