"""The sim engine's paged KV memory: one array of whole blocks per layer, as a real engine has it.

Block order in memory says nothing; a sequence's KV is found through its list of blocks. The digest of a
sequence is always taken from these bytes, never from its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pdmesh.engine.sim.model import MASK, SimModel, Words
from pdmesh.kv.scatter import HostBlocks

ByteMatrix = npt.NDArray[np.uint8]


class PagedMemory:
    """`caches[layer]` has shape [num_blocks, block_bytes]."""

    def __init__(self, model: SimModel, num_blocks: int) -> None:
        params = model.params
        self.model = model
        self.caches: list[ByteMatrix] = [
            np.zeros((num_blocks, params.block_bytes), np.uint8) for _ in range(params.num_layers)
        ]
        self.blocks = HostBlocks(self.caches)
        self.layers = [HostBlocks([cache]) for cache in self.caches]

    def write(self, blocks: Sequence[int], states: Words, start: int) -> None:
        """Write the KV of the tokens from position `start` on, given the states of all tokens."""
        for layer in range(self.model.params.num_layers):
            self.write_layer(layer, blocks, states, start)

    def write_layer(self, layer: int, blocks: Sequence[int], states: Words, start: int) -> None:
        """`write` of one layer."""
        params, cache = self.model.params, self.caches[layer]
        first = (
            start // params.block_size
        )  # a partly filled block is written anew, from its own start
        states = states[first * params.block_size :]
        if len(states) == 0:
            return
        full, tail = divmod(len(states), params.block_size)
        targets = list(blocks[first : first + full + (tail > 0)])
        data = self.model.kv_words(states, layer).view(np.uint8)
        split = full * params.block_size
        cache[targets[:full]] = data[:split].reshape(full, params.block_bytes)
        if tail:
            cache[targets[full], : tail * params.token_bytes] = data[split:].reshape(-1)

    def digest(self, blocks: Sequence[int], num_tokens: int) -> int:
        """Of the KV of the first `num_tokens` tokens of a sequence that lies in `blocks`."""
        params = self.model.params
        used = list(blocks[: -(-num_tokens // params.block_size)])
        total = 0
        for layer, cache in enumerate(self.caches):
            words = cache[used].reshape(-1, params.token_bytes).view(np.uint64)[:num_tokens]
            total += self.model.digest(words, layer)
        return total & MASK
