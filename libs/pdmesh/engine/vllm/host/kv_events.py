"""Translates vLLM's prefix-cache events into the mesh's names of blocks (S80).

vLLM identifies blocks by its own hashes, and publishes each block's tokens and parent. The mesh's
name of a block is a chained hash of all tokens up to the block's end. The root of the chain is the
cache salt that the mesh gave vLLM with the request. Blocks without a salt have no name in the mesh.
If events are missing, any block may have been removed, so the set of held blocks starts empty
again. The names of these blocks are kept, because later blocks may have them as parents.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from pdmesh.core.kv.prefix.block_hash import HASH_BYTES, block_hashes
from pdmesh.engine.base import BlocksChanged


class BlockStored(msgspec.Struct, tag=True):
    """vLLM's event as it is published. Unknown fields are skipped."""

    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    extra_keys: list[list[Any] | None] | None = None  # Any: vLLM mixes strings, pairs and bytes
    group_idx: int | None = None


class BlockRemoved(msgspec.Struct, tag=True):
    block_hashes: list[bytes | int]
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True):
    pass


CacheEvent = BlockStored | BlockRemoved | AllBlocksCleared


class _Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[CacheEvent]


_decoder = msgspec.msgpack.Decoder(_Batch)


def decode_batch(payload: bytes) -> list[CacheEvent]:
    """Raises msgspec.DecodeError if vLLM's format has changed."""
    return _decoder.decode(payload).events


@dataclass(slots=True)
class BlockNames:
    """Maps vLLM's block hashes to the mesh's names.

    `capacity` limits how many names are remembered. The name of the block that was reported longest
    ago is forgotten first. A cache group is a set of layers that need the same share of a text: all
    of it, or a window. vLLM reports a block once for each cache group, and only the reports about
    `group` are used. `group` should have no window, because such a group keeps a prefix longest.
    vLLM itself checks that the other groups hold the prefix, too.
    """

    capacity: int
    block_size: int
    group: int = 0
    _names: OrderedDict[bytes | int, tuple[bytes, bytes]] = field(default_factory=OrderedDict)
    _held: dict[bytes, None] = field(default_factory=dict)
    _stored: dict[bytes, None] = field(default_factory=dict)  # in this batch
    _removed: dict[bytes, None] = field(default_factory=dict)
    _next_sequence: int | None = None

    def handle(self, sequence: int, events: Sequence[CacheEvent]) -> BlocksChanged | None:
        """The changes that one published batch of events makes.

        None if no block with a name in the mesh changes.
        """
        is_cleared = self._next_sequence is not None and sequence != self._next_sequence
        if is_cleared:
            self._held.clear()
        self._next_sequence = sequence + 1
        self._stored.clear()
        self._removed.clear()
        for event in filter(self._counts, events):
            match event:
                case BlockStored():
                    self._store(event)
                case BlockRemoved():
                    for block in event.block_hashes:
                        if block in self._names:
                            self._remove(self._names[block][0])
                case AllBlocksCleared():
                    is_cleared = True
                    self._held.clear()
        if is_cleared:
            return BlocksChanged(tuple(self._held), (), is_cleared=True)
        if self._stored or self._removed:
            return BlocksChanged(tuple(self._stored), tuple(self._removed))
        return None

    def num_held(self, names: Sequence[bytes]) -> int:
        """The number of leading blocks in `names` that the engine holds, by its events so far."""
        return sum(1 for _ in itertools.takewhile(self._held.__contains__, names))

    def _counts(self, event: CacheEvent) -> bool:
        return isinstance(event, AllBlocksCleared) or event.group_idx in (None, self.group)

    def _store(self, event: BlockStored) -> None:
        origin = self._origin(event)
        if origin is None or event.block_size != self.block_size:
            return
        if len(event.block_hashes) * event.block_size != len(event.token_ids):
            return  # for a window, vLLM keeps only the last blocks and does not say which these are
        root, parent = origin
        images = images_in(event.extra_keys or (), event.block_size)
        hashes = block_hashes(root, event.token_ids, event.block_size, parent, images)
        for block, name in zip(event.block_hashes, hashes, strict=False):
            self._names[block] = (name, root)
            self._names.move_to_end(block)
            self._add(name)
        while len(self._names) > self.capacity:
            _, (name, _) = self._names.popitem(last=False)
            self._remove(name)

    def _add(self, name: bytes) -> None:
        if name in self._held:
            return  # already known: vLLM also reports blocks that it uses again
        self._held[name] = None
        if name in self._removed:
            del self._removed[name]
        else:
            self._stored[name] = None

    def _remove(self, name: bytes) -> None:
        if name not in self._held:
            return
        del self._held[name]
        if name in self._stored:
            del self._stored[name]
        else:
            self._removed[name] = None

    def _origin(self, event: BlockStored) -> tuple[bytes, bytes] | None:
        """(root, parent's name) of the event's first block.

        None if the block has no name in the mesh.
        """
        if event.parent_block_hash is not None:
            known = self._names.get(event.parent_block_hash)
            return (known[1], known[0]) if known else None
        salts = event.extra_keys[0] if event.extra_keys else None
        for salt in salts or ():
            if isinstance(salt, str) and len(salt) == 2 * HASH_BYTES:
                try:
                    return bytes.fromhex(salt), b""
                except ValueError:
                    continue
        return None


def images_in(
    extra_keys: Sequence[Sequence[Any] | None], block_size: int
) -> Sequence[tuple[int, bytes]]:
    """The images that begin in the blocks of an event: (place among the event's tokens, digest).

    Each block that an image covers lists the image as a pair: the image's name, and its place
    relative to the block. The name ends with the KV's owner and the digest, and may begin with a
    LoRA adapter's name.
    """
    found: list[tuple[int, bytes]] = []
    for block, keys in enumerate(extra_keys):
        for key in keys or ():
            match key:
                case [str(name), int(at)] if at >= 0:
                    found.append((block * block_size + at, bytes.fromhex(name.rpartition(":")[2])))
    return found


async def read_events(
    endpoint: str, names: BlockNames, emit: Callable[[BlocksChanged], None]
) -> None:
    """Follow vLLM's publisher until cancelled.

    A message has three parts: topic, 8-byte big-endian sequence number, payload.
    """
    context = zmq.asyncio.Context()
    subscriber = context.socket(zmq.SUB)
    subscriber.setsockopt(zmq.SUBSCRIBE, b"")
    subscriber.setsockopt(zmq.RCVHWM, 100_000)
    try:
        subscriber.connect(endpoint)
        while True:
            _, sequence, payload = await subscriber.recv_multipart()
            changed = names.handle(int.from_bytes(sequence, "big"), decode_batch(payload))
            if changed:
                emit(changed)
            await asyncio.sleep(0)  # a burst of events must not delay tokens
    finally:
        subscriber.close(linger=0)
        context.term()
