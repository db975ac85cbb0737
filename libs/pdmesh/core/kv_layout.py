"""How many bytes a prompt's KV has and where each piece lies in the contiguous buffer (S3, S47).

The buffer is layer-major, then blocks in the order of the prompt: the bytes of a block are opaque here, so
that any engine's packing travels unchanged; equal fingerprints say that both sides pack alike.
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
    """What decides the size of a model's KV. `num_kv_heads` equals the query heads in MHA, fewer in GQA.

    `scale_bytes` are those a quantised cache keeps beside each token and layer (0 for none, per-tensor too).
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    scale_bytes: int = 0

    @property
    def token_layer_bytes(self) -> int:
        """K and V of one token in one layer: the paper's 2 * hidden * precision, with kv heads for hidden."""
        return 2 * self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype] + self.scale_bytes

    @property
    def token_bytes(self) -> int:
        return self.num_layers * self.token_layer_bytes

    def kv_bytes(self, num_tokens: int, block_size: int) -> int:
        """Bytes of a prompt in whole blocks, all layers."""
        return -(-num_tokens // block_size) * block_size * self.token_bytes

    def per_rank(self, num_ranks: int) -> KvShape:
        """The share of one of `num_ranks` tensor-parallel ranks; heads are copied when there are fewer."""
        if self.num_kv_heads % num_ranks and num_ranks % self.num_kv_heads:
            raise ValueError(f"{self.num_kv_heads} kv heads do not divide over {num_ranks} ranks")
        heads = max(1, self.num_kv_heads // num_ranks)
        return KvShape(self.num_layers, heads, self.head_dim, self.dtype, self.scale_bytes)


@dataclass(frozen=True, slots=True)
class KvSpan:
    """Contiguous bytes of the buffer."""

    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class KvLayout:
    """One prompt's buffer on one rank: `num_layers` x `num_blocks` x `block_bytes` (of one layer)."""

    num_layers: int
    num_blocks: int
    block_bytes: int
    fingerprint: str = ""

    @property
    def total_bytes(self) -> int:
        return self.num_layers * self.num_blocks * self.block_bytes

    def offset(self, layer: int, block: int) -> int:
        """Where a block of a layer begins."""
        if not (0 <= layer < self.num_layers and 0 <= block < self.num_blocks):
            raise IndexError(f"no block {block} of layer {layer} in {self}")
        return (layer * self.num_blocks + block) * self.block_bytes

    def layer(self, layer: int, first_block: int = 0) -> KvSpan:
        """The blocks of one layer from `first_block` on."""
        start = layer * self.num_blocks + first_block
        length = (self.num_blocks - first_block) * self.block_bytes
        return KvSpan(start * self.block_bytes, length)

    def spans(self, first_block: int = 0) -> list[KvSpan]:
        """The fewest contiguous ranges that hold the blocks from `first_block` on: one, or one per layer."""
        if not 0 <= first_block <= self.num_blocks:
            raise IndexError(f"first block {first_block} of {self.num_blocks}")
        if first_block == 0 and self.total_bytes:
            return [KvSpan(0, self.total_bytes)]
        spans = [self.layer(i, first_block) for i in range(self.num_layers)]
        return [span for span in spans if span.length]
