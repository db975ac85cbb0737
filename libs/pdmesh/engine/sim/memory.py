"""The simulated engine's paged KV memory: one array of blocks per layer, as in a real engine.

A sequence has a list of blocks, which may be anywhere in memory. The digest that decides the
sequence's next token is computed from the bytes of the prompt's KV, never from the tokens. Each
drawn token then updates the digest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pdmesh.engine.sim.block_pool import BlockPool
from pdmesh.engine.sim.model import SimModel, Words
from pdmesh.kv.device.scatter import HostBlocks

ByteMatrix = npt.NDArray[np.uint8]


class PagedMemory:
    """`caches[layer]` has shape [num_blocks, block_bytes]."""

    def __init__(self, model: SimModel, num_blocks: int) -> None:
        params = model.params
        self.model = model
        self._bytes = np.zeros((params.num_layers, num_blocks, params.block_bytes), np.uint8)
        self.caches: list[ByteMatrix] = list(self._bytes)
        self.blocks = HostBlocks(self.caches)
        self.layers = [HostBlocks([cache]) for cache in self.caches]

    def write(self, blocks: Sequence[int], states: Words, start: int) -> None:
        """Write the KV of the tokens from position `start` on, given the states of all tokens."""
        self._write(slice(None), blocks, states, start)

    def write_layer(self, layer: int, blocks: Sequence[int], states: Words, start: int) -> None:
        """Do the same as `write` for one layer."""
        self._write(slice(layer, layer + 1), blocks, states, start)

    def _write(self, layers: slice, blocks: Sequence[int], states: Words, start: int) -> None:
        params = self.model.params
        size, width = params.block_size, params.token_bytes
        data = self.model.kv_words(states[start:], layers).view(np.uint8)
        caches = self._bytes[layers]
        first, within = divmod(start, size)
        if within:  # the block's content before `start` stays
            count = min(size - within, data.shape[1])
            head = data[:, :count].reshape(len(caches), count * width)
            caches[:, blocks[first], within * width : (within + count) * width] = head
            data, first = data[:, count:], first + 1
        full, tail = divmod(data.shape[1], size)
        if full:
            written = data[:, : full * size].reshape(len(caches), full, params.block_bytes)
            caches[:, blocks[first : first + full]] = written
        if tail:
            rest = data[:, full * size :].reshape(len(caches), tail * width)
            caches[:, blocks[first + full], : tail * width] = rest

    def digest(self, blocks: Sequence[int], num_tokens: int) -> int:
        """The digest of a sequence's KV in `blocks`, over its first `num_tokens` tokens."""
        params = self.model.params
        used = list(blocks[: -(-num_tokens // params.block_size)])
        words = self._bytes[:, used].view(np.uint64)
        tokens = words.reshape(params.num_layers, -1, params.token_bytes // 8)[:, :num_tokens]
        return self.model.digest(tokens)


@dataclass(frozen=True, slots=True)
class SimKv:
    """The bytes of all blocks, and the record of the blocks' use."""

    memory: PagedMemory
    pool: BlockPool
