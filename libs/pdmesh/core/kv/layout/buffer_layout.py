"""Decides how many bytes a prompt's KV has and where each piece lies in one buffer (S3, S47).

The buffer has one layer after the other. A layer has one head after the other, and a head has its
blocks in the order of the prompt. The layout does not look into the bytes of a head's block, so
these bytes may be packed as an engine likes. Engines exchange KV only if their fingerprints are
equal (`compatibility.py`), and such engines pack alike. `core/kv/transfer/pull_parts.py` decides
into which parts a transfer of the buffer is cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

DTYPE_BYTES: Final = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "int8": 1,
}


@dataclass(frozen=True, slots=True)
class KvShape:
    """The numbers that decide the size of a model's KV, or of one rank's share of it.

    `num_kv_heads` equals the number of query heads in MHA and is smaller in GQA. A quantised cache
    may keep scales beside K and V of each token and head. These scales take `scale_bytes` for each
    token and head. Scales of a whole tensor are part of the fingerprint instead, and need no
    `scale_bytes`.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    scale_bytes: int = 0

    @property
    def token_layer_bytes(self) -> int:
        """The bytes of K and V of one token in one layer, with their scales.

        Without scales, this is 2 * hidden * precision of the P/D-Serve paper, where hidden covers
        only the KV heads.
        """
        return self.num_kv_heads * (2 * self.head_dim * DTYPE_BYTES[self.dtype] + self.scale_bytes)

    @property
    def token_bytes(self) -> int:
        return self.num_layers * self.token_layer_bytes

    def kv_bytes(self, num_tokens: int, block_size: int) -> int:
        """The bytes of a prompt over all layers, rounded up to whole blocks."""
        return -(-num_tokens // block_size) * block_size * self.token_bytes


@dataclass(frozen=True, slots=True)
class KvSpan:
    """Contiguous bytes of the buffer."""

    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class KvLayout:
    """The layout of one prompt's buffer on one rank.

    The axes are layer, head and block. An item is one head's bytes in one block and one layer.
    `block_bytes` is the size of a block in one layer, with all heads. A block that cannot be cut by
    heads counts as one head. `first_blocks` gives for each layer the first block that is in the
    buffer, because some layers see only a window of the last tokens. If it is empty, all blocks are
    in the buffer.
    """

    num_layers: int
    num_blocks: int
    block_bytes: int
    fingerprint: str = ""
    num_heads: int = 1
    first_blocks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.num_heads < 1 or self.block_bytes % self.num_heads:
            raise ValueError(f"{self.block_bytes} bytes do not divide over {self.num_heads} heads")
        firsts = self.first_blocks
        if firsts and (
            len(firsts) != self.num_layers or not 0 <= min(firsts) <= max(firsts) <= self.num_blocks
        ):
            raise ValueError(
                f"first blocks {firsts} of {self.num_layers} layers, {self.num_blocks} blocks each"
            )

    @property
    def total_bytes(self) -> int:
        return (self.num_layers * self.num_blocks - sum(self.first_blocks)) * self.block_bytes

    def first_block(self, layer: int) -> int:
        """The first block of the layer that is in the buffer."""
        return self.first_blocks[layer] if self.first_blocks else 0

    def layer_start(self, layer: int) -> int:
        num_blocks = layer * self.num_blocks - sum(self.first_blocks[:layer])
        return num_blocks * self.block_bytes

    def offset(self, layer: int, block: int) -> int:
        """Where a block of a layer begins.

        Only for a layout of one head. With more heads, the bytes of a block are not contiguous.
        """
        assert self.num_heads == 1
        if not (
            0 <= layer < self.num_layers and self.first_block(layer) <= block < self.num_blocks
        ):
            raise IndexError(f"no block {block} of layer {layer} in {self}")
        return self.layer_start(layer) + (block - self.first_block(layer)) * self.block_bytes

    def spans(self, layer: int, first_block: int, first_head: int, num_heads: int) -> list[KvSpan]:
        """The bytes of one layer's heads from `first_block` on: one span, or one per head."""
        head_bytes = self.block_bytes // self.num_heads  # of one block
        row_bytes = (self.num_blocks - self.first_block(layer)) * head_bytes
        start = self.layer_start(layer) + first_head * row_bytes
        skipped = max(0, first_block - self.first_block(layer)) * head_bytes
        if not skipped:
            return [KvSpan(start, num_heads * row_bytes)]
        return [
            KvSpan(start + i * row_bytes + skipped, row_bytes - skipped) for i in range(num_heads)
        ]
