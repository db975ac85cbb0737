"""The KV that is moved: a prompt's KV, in randomly scattered blocks of every layer, as in a paged
cache.

By default, the shape is that of an 8B model with grouped-query attention in 16-bit. A block is K or
V of 16 tokens in one layer, with 32 KiB. A token has 128 KiB. Some modes also imitate this model's
prefill on one device. It computes a fixed number of tokens per second, but a prompt takes at least
as long as reading the weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from pdmesh.core.kv.layout.buffer_layout import KvLayout, KvShape
from pdmesh.kv.device.scatter import ByteMatrix, HostBlocks
from pdmesh.kv.transport.base import ByteArray

SHAPE: Final = KvShape(num_layers=32, num_kv_heads=8, head_dim=128, dtype="bfloat16")
NUM_LAYERS: Final = SHAPE.num_layers
BLOCK_BYTES: Final = 16 * SHAPE.token_layer_bytes // 2
TOKEN_BYTES: Final = SHAPE.token_bytes
TOKENS_PER_S: Final = 8000.0
WEIGHTS_S: Final = 0.008  # the time to read the weights once, even for a short prompt
FINGERPRINT: Final = "kv-bench"

# In each round, all modes run in this order for each size. Ratios compare two modes of a round.
BLOCKS_ACKED: Final = "blocks_acked"
BLOCKS_PIPELINED: Final = "blocks_pipelined"
WHOLE: Final = "whole"
CHUNKED: Final = "chunked"
LAYERS: Final = "layers"
WHOLE_COMPUTED: Final = "whole_computed"
LAYERS_COMPUTED: Final = "layers_computed"
WIRE: Final = "wire"
WIRE_EMPTY: Final = "wire_empty"
MODES: Final = (
    BLOCKS_ACKED,
    BLOCKS_PIPELINED,
    WHOLE,
    CHUNKED,
    LAYERS,
    WHOLE_COMPUTED,
    LAYERS_COMPUTED,
    WIRE,
    WIRE_EMPTY,
)
LABELS: Final = {
    BLOCKS_ACKED: "block by block, each acknowledged",
    BLOCKS_PIPELINED: "blocks, 32 in flight",
    WHOLE: "block-free, one range, one step after the other",
    CHUNKED: "block-free, whole model staged, chunks overlap",
    LAYERS: "block-free, layer by layer, gather overlaps too",
    WHOLE_COMPUTED: "after prefill: whole model",
    LAYERS_COMPUTED: "after prefill: layer by layer",
    WIRE: "the payload alone",
    WIRE_EMPTY: "the payload alone, of memory never written",
}


@dataclass(frozen=True, slots=True)
class Paging:
    """How a paged cache divides a prompt's KV into blocks."""

    num_layers: int = NUM_LAYERS
    block_bytes: int = BLOCK_BYTES  # bytes of a block in one layer


DEFAULT_PAGING: Final = Paging()


@dataclass(frozen=True, slots=True)
class Command:
    """One task for a pair of processes. With `chunk_bytes` 0, chunks have the product's own
    size.
    """

    mode: str
    num_bytes: int
    serial: int
    repeats: int = 1
    chunk_bytes: int = 0
    is_verified: bool = False
    paging: Paging = DEFAULT_PAGING

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Command:
        return cls(**data | {"paging": Paging(**data["paging"])})


def layout_of(num_bytes: int, paging: Paging = DEFAULT_PAGING) -> KvLayout:
    """The layout of `num_bytes` of KV.

    Raises ValueError unless whole blocks of all layers have exactly `num_bytes`.
    """
    num_blocks, rest = divmod(num_bytes, paging.num_layers * paging.block_bytes)
    if rest:
        raise ValueError(f"{num_bytes} bytes are not whole blocks of {paging.num_layers} layers")
    return KvLayout(paging.num_layers, num_blocks, paging.block_bytes, FINGERPRINT)


def layer_compute_s(num_bytes: int) -> float:
    """How long the model takes to compute one layer of a prompt with `num_bytes` of KV."""
    return max(num_bytes / TOKEN_BYTES / TOKENS_PER_S, WEIGHTS_S) / NUM_LAYERS


class PagedCache:
    """The paged cache of one side.

    The cache is 1.5 times as large as the largest prompt. Each prompt takes random blocks of it.
    """

    def __init__(self, largest: int, seed: int, paging: Paging = DEFAULT_PAGING) -> None:
        self.paging = paging
        needed = -(-largest // (paging.num_layers * paging.block_bytes))
        self._num_blocks = needed * 3 // 2 + 1
        self._random = np.random.default_rng(seed)
        pool = np.empty((paging.num_layers, self._num_blocks, paging.block_bytes), np.uint8)
        words = pool.view(np.uint64)
        words[:] = self._random.integers(0, 1 << 62, words.shape[1:], np.uint64)
        # Add the number of each layer, so that layers have different bytes.
        words += np.arange(paging.num_layers, dtype=np.uint64)[:, None, None]
        self._layers: list[ByteMatrix] = list(pool)
        self.all_layers = HostBlocks(self._layers)
        self.by_layer = [HostBlocks([layer]) for layer in self._layers]

    def take(self, num_bytes: int) -> npt.NDArray[np.intp]:
        """The block ids of a new prompt, drawn at random."""
        count = layout_of(num_bytes, self.paging).num_blocks
        return self._random.permutation(self._num_blocks)[:count]

    def blocks(self, ids: npt.NDArray[np.intp]) -> list[ByteArray]:
        """Each block of each layer, layer by layer, for a transfer block by block."""
        return [layer[i] for layer in self._layers for i in ids]

    def digest(self, ids: npt.NDArray[np.intp]) -> str:
        out = np.empty(len(ids) * self.paging.num_layers * self.paging.block_bytes, np.uint8)
        self.all_layers.gather(ids, out)
        return xxhash.xxh3_128_hexdigest(out.data)

    def wipe(self, ids: npt.NDArray[np.intp]) -> None:
        for layer in self._layers:
            layer[ids] = 0
