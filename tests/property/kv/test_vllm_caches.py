"""vLLM's KV caches as real tensors, in the layouts of its CPU and GPU kernels.

The tests gather and scatter them head by head or as whole blocks.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from pdmesh.core.kv.layout.buffer_layout import KvShape  # noqa: E402
from pdmesh.core.kv.layout.cache_groups import NULL_BLOCK, CacheGroups  # noqa: E402
from pdmesh.core.kv.layout.rank_heads import heads_of, pieces  # noqa: E402
from pdmesh.core.kv.transfer.pull_parts import pull_parts  # noqa: E402
from pdmesh.engine.vllm.connector.worker.cache_choice import paged_caches  # noqa: E402
from pdmesh.engine.vllm.connector.worker.cache_layout import read_layout  # noqa: E402
from pdmesh.engine.vllm.connector.worker.caches import PagedCaches, layout_of  # noqa: E402
from pdmesh.engine.vllm.connector.worker.group_caches import GroupCaches  # noqa: E402

NUM_LAYERS, NUM_BLOCKS, TOKENS, HEAD_DIM = 2, 6, 4, 8
# Each pair: the axes of the tensor that vLLM registers, and their order in memory.
LAYOUTS = (
    ("kbnhc", "kbnhc"),  # flash attention: [2, blocks, tokens, heads, head size]
    ("bknhc", "bknhc"),
    ("kbnhc", "kbhnc"),
    ("bhnc", "bnhc"),  # vLLM 0.32: K and V in the content axis, tokens first in memory
    ("bhnc", "bhnc"),
)
PACKED = LAYOUTS[-1]  # on a CPU: a head's block in one piece, packed for the kernels
SCALE_BYTES = 8
DTYPES = ("float16", "bfloat16", "float8_e4m3fn", "int8", "float32")


class Rank:
    """The caches of one rank, either empty or filled with this rank's heads of the model's KV."""

    def __init__(self, layout: tuple[str, str], dtype: str, num_heads: int) -> None:
        axes, order = layout
        counts = {"k": 2, "b": NUM_BLOCKS, "h": num_heads, "n": TOKENS}
        kind = getattr(torch, dtype)
        # int8 has a scale in fp32 for each token and head, after the numbers of K and of V. The
        # scales are moved, too.
        self.content = HEAD_DIM + (SCALE_BYTES // 2 if dtype == "int8" else 0)
        counts["c"] = self.content if "k" in axes else 2 * self.content
        self.axes, self.item = axes, kind.itemsize
        self.tensors: dict[str, Any] = {}
        for layer in range(NUM_LAYERS):
            memory = torch.zeros([counts[a] for a in order], dtype=kind)
            self.tensors[f"layer.{layer}"] = memory.permute([order.index(a) for a in axes])
        found = read_layout(self.tensors, NUM_BLOCKS, num_heads, is_packed=False)
        assert not found.is_opaque
        self.block = found.block
        self.caches: PagedCaches = paged_caches(self.tensors, found, NUM_BLOCKS)

    def bytes_of(self, layer: int, block: int, head: int) -> Any:
        """The bytes of a head's block as [K or V, token, bytes], by torch's own indexing."""
        tensor = self.tensors[f"layer.{layer}"].view(torch.uint8)
        index: list[Any] = [slice(None)] * len(self.axes)
        index[self.axes.index("b")], index[self.axes.index("h")] = block, head
        found = tensor[tuple(index)]
        if "k" in self.axes:
            return found
        return torch.stack(found.split(self.content * self.item, dim=-1))  # a copy


def put(rank: Rank, layer: int, block: int, head: int, kv: Any) -> None:
    tensor = rank.tensors[f"layer.{layer}"].view(torch.uint8)
    index: list[Any] = [slice(None)] * len(rank.axes)
    index[rank.axes.index("b")], index[rank.axes.index("h")] = block, head
    tensor[tuple(index)] = kv if "k" in rank.axes else torch.cat((kv[0], kv[1]), dim=-1)


@pytest.mark.req("S57", "S50", "S126")
@given(
    num_heads=st.sampled_from((1, 2, 4, 8)),
    ranks=st.tuples(st.sampled_from((1, 2, 4, 8)), st.sampled_from((1, 2, 4, 8))),
    layout=st.sampled_from(LAYOUTS),
    dtype=st.sampled_from(DTYPES),
    num_used=st.integers(1, 3),
    seed=st.integers(0, 2**32 - 1),
)
def test_each_destination_rank_gets_its_heads_bit_for_bit(
    num_heads: int,
    ranks: tuple[int, int],
    layout: tuple[str, str],
    dtype: str,
    num_used: int,
    seed: int,
) -> None:
    num_sources, num_destinations = ranks
    rng = np.random.default_rng(seed)
    content = Rank(layout, dtype, 1).content * getattr(torch, dtype).itemsize
    shape = (NUM_LAYERS, num_used, num_heads, 2, TOKENS, content)
    whole = torch.from_numpy(rng.integers(0, 256, shape, np.uint8))
    source_ids, target_ids = (rng.permutation(NUM_BLOCKS)[:num_used].tolist() for _ in range(2))
    done: list[str] = []

    staged = []
    for rank in range(num_sources):
        mine = heads_of(num_heads, num_sources, rank)
        source = Rank(layout, dtype, mine.count)
        for layer, i, head in np.ndindex(NUM_LAYERS, num_used, mine.count):
            put(source, layer, source_ids[i], head, whole[layer, i, mine.first + head])
        out = np.zeros(layout_of(source.caches, num_used, "").total_bytes, np.uint8)
        source.caches.gather(source_ids, out, lambda: done.append("gathered"))
        staged.append(out.reshape(NUM_LAYERS, mine.count, num_used, -1))
        one = np.zeros(out.size // NUM_LAYERS, np.uint8)
        source.caches.gather_layer(1, source_ids, one, lambda: done.append("gathered"))
        assert (one == out.reshape(NUM_LAYERS, -1)[1]).all()

    for rank in range(num_destinations):
        mine = heads_of(num_heads, num_destinations, rank)
        target = Rank(layout, dtype, mine.count)
        for piece in pieces(num_heads, num_sources, num_destinations, rank):
            if not piece.count:
                continue
            heads = slice(piece.source_head, piece.source_head + piece.count)
            landed = np.ascontiguousarray(staged[piece.source_rank][:, heads]).reshape(-1)
            target.caches.scatter(
                landed, target_ids, lambda: done.append("scattered"), (piece.head, piece.count)
            )
        for layer, i, head in np.ndindex(NUM_LAYERS, num_used, mine.count):
            got = target.bytes_of(layer, target_ids[i], head)
            assert (got == whole[layer, i, mine.first + head]).all()
    assert done.count("gathered") == 2 * num_sources


@pytest.mark.req("S57", "S50")
@given(
    st.sampled_from([(1, 2), (2, 1), (1, 4), (4, 2), (2, 8)]), st.sampled_from(DTYPES),
    st.integers(0, 999),
)  # fmt: skip
def test_packed_heads_are_cut_for_other_numbers_of_ranks(
    ranks: tuple[int, int], dtype: str, seed: int
) -> None:
    """A CPU's blocks move head by head. The content of a head's block is opaque."""
    num_heads, (num_sources, num_targets) = 4, ranks
    rng = np.random.default_rng(seed)
    sources = [Rank(PACKED, dtype, heads_of(num_heads, num_sources, r).count) for r in
               range(num_sources)]  # fmt: skip
    source_ids, target_ids = (rng.permutation(NUM_BLOCKS)[:3].tolist() for _ in range(2))
    item = sources[0].content * sources[0].item
    whole = rng.integers(0, 256, (NUM_LAYERS, 3, num_heads, 2, TOKENS, item), np.uint8)
    staged, blocks = [], set()
    for number, source in enumerate(sources):
        mine = heads_of(num_heads, num_sources, number)
        for layer, i, head in np.ndindex(NUM_LAYERS, 3, mine.count):
            kv = torch.from_numpy(whole[layer, i, mine.first + head])
            put(source, layer, source_ids[i], head, kv)
        found = read_layout(source.tensors, NUM_BLOCKS, mine.count, is_packed=True, kernels="k")
        blocks.add(found.block)
        caches = paged_caches(source.tensors, found, NUM_BLOCKS)
        layout = layout_of(caches, 3, "")
        staged.append((layout, np.zeros(layout.total_bytes, np.uint8)))
        caches.gather(source_ids, staged[-1][1])
    for number in range(num_targets):
        mine = heads_of(num_heads, num_targets, number)
        target = Rank(PACKED, dtype, mine.count)
        found = read_layout(target.tensors, NUM_BLOCKS, mine.count, is_packed=True, kernels="k")
        blocks.add(found.block)
        into = paged_caches(target.tensors, found, NUM_BLOCKS)
        for piece in pieces(num_heads, num_sources, num_targets, number):
            if not piece.count:
                continue
            layout, buffer = staged[piece.source_rank]
            heads = (piece.source_head, piece.count)
            landed = np.concatenate(
                [buffer[s.offset : s.offset + s.length] for part in pull_parts(layout, heads=heads)
                 for s in part.spans]
            )  # fmt: skip
            into.scatter_part(landed, 0, target_ids, (piece.head, piece.count))
        for layer, i, head in np.ndindex(NUM_LAYERS, 3, mine.count):
            got = target.bytes_of(layer, target_ids[i], head)
            assert (got.numpy() == whole[layer, i, mine.first + head]).all()
    assert len(blocks) == 1, "all ranks may exchange blocks"


@pytest.mark.req("S50")
@given(st.sampled_from(LAYOUTS[2:]), st.sampled_from(DTYPES), st.integers(0, 999))
def test_opaque_blocks_move_whole(layout: tuple[str, str], dtype: str, seed: int) -> None:
    """A block whose packed heads are not contiguous in memory cannot be divided."""
    if layout[1][0] != "b":
        layout = LAYOUTS[3]
    rank = Rank(layout, dtype, 2)
    found = read_layout(rank.tensors, NUM_BLOCKS, 2, is_packed=True)
    assert found.is_opaque == (layout != PACKED)
    caches = paged_caches(rank.tensors, found, NUM_BLOCKS)
    rng = np.random.default_rng(seed)
    for layer, block, head in np.ndindex(NUM_LAYERS, NUM_BLOCKS, 2):
        kv = torch.from_numpy(rng.integers(0, 256, (2, TOKENS, rank.content * rank.item), np.uint8))
        put(rank, layer, block, head, kv)
    other = Rank(layout, dtype, 2)
    into = paged_caches(
        other.tensors, read_layout(other.tensors, NUM_BLOCKS, 2, is_packed=True), NUM_BLOCKS
    )
    buffer = np.zeros(layout_of(caches, 3, "").total_bytes, np.uint8)
    caches.gather([4, 0, 5], buffer, lambda: None)
    one = np.zeros(buffer.size // NUM_LAYERS, np.uint8)
    caches.gather_layer(0, [4, 0, 5], one, lambda: None)
    assert (one == buffer[: one.size]).all()
    into.scatter(buffer, [1, 2, 3], lambda: None)
    for layer, head in np.ndindex(NUM_LAYERS, 2):
        for source, target in ((4, 1), (0, 2), (5, 3)):
            assert (rank.bytes_of(layer, source, head) == other.bytes_of(layer, target, head)).all()


@pytest.mark.req("S50")
@given(
    st.sampled_from(LAYOUTS),
    st.booleans(),
    st.sets(st.integers(1, 30), max_size=4),
    st.integers(0, 99),
)
def test_parts_scatter_as_the_whole_does(
    layout: tuple[str, str], is_packed: bool, cuts: set[int], seed: int
) -> None:
    """Parts may begin and end between any two blocks of a head."""
    if is_packed and layout[1][0] != "b":
        layout = LAYOUTS[3]
    num_heads, ids = 3, [4, 1, 2]
    whole, parted = (Rank(layout, "float16", num_heads) for _ in range(2))
    caches = [
        paged_caches(
            rank.tensors,
            read_layout(rank.tensors, NUM_BLOCKS, num_heads, is_packed=is_packed),
            NUM_BLOCKS,
        )
        for rank in (whole, parted)
    ]
    shape = layout_of(caches[0], len(ids), "")
    data = np.random.default_rng(seed).integers(0, 256, shape.total_bytes, np.uint8)
    unit = shape.block_bytes // shape.num_heads
    edges = [0, *(c * unit for c in sorted(cuts) if c * unit < data.size), data.size]
    caches[0].scatter(data, ids, lambda: None)
    for a, b in pairwise(edges):
        caches[1].scatter_part(data[a:b], a, ids)
    for name, tensor in whole.tensors.items():
        assert (tensor.view(torch.uint8) == parted.tensors[name].view(torch.uint8)).all()
    if not is_packed or layout == PACKED:  # also for a piece that has two of the heads
        some = np.random.default_rng(seed + 1).integers(0, 256, data.size // 3 * 2, np.uint8)
        caches[0].scatter(some, ids, lambda: None, (1, 2))
        for a, b in pairwise(e for e in (*edges[:-1], some.size) if e <= some.size):
            caches[1].scatter_part(some[a:b], a, ids, (1, 2))
        for name, tensor in whole.tensors.items():
            assert (tensor.view(torch.uint8) == parted.tensors[name].view(torch.uint8)).all()
    with pytest.raises(ValueError, match="whole blocks"):
        caches[1].scatter_part(data[: unit - 2], 0, ids)


@pytest.mark.req("S50")
@given(
    st.sampled_from(LAYOUTS),
    st.booleans(),
    st.sets(st.integers(1, 20), max_size=4),
    st.integers(0, 99),
)
def test_each_layer_travels_with_the_block_ids_of_its_group(
    layout: tuple[str, str], is_packed: bool, cuts: set[int], seed: int
) -> None:
    """Layer 1 has a window of 5 of the 11 tokens, so it has none of the prompt's first block."""
    if is_packed and layout[1][0] != "b":
        layout = LAYOUTS[3]
    num_heads, groups = 3, CacheGroups(TOKENS, (0, 5))
    ranks = [Rank(layout, "float16", num_heads) for _ in range(3)]
    source, target, whole = (
        GroupCaches(
            paged_caches(
                rank.tensors,
                read_layout(rank.tensors, NUM_BLOCKS, num_heads, is_packed=is_packed),
                NUM_BLOCKS,
            ),
            groups,
            (0, 1),
            "fp",
        )
        for rank in ranks
    )
    rng = np.random.default_rng(seed)
    for layer, block, head in np.ndindex(NUM_LAYERS, NUM_BLOCKS, num_heads):
        kv = rng.integers(0, 256, (2, TOKENS, 2 * HEAD_DIM), np.uint8)
        put(ranks[0], layer, block, head, torch.from_numpy(kv))
    theirs, ours = ((4, 1, 2), (3, 5)), ((2, 5, 1), (4, 1))
    shape = source.layout(11)
    assert shape.total_bytes == source.num_bytes(theirs) == 5 * shape.block_bytes
    buffer = np.zeros(shape.total_bytes, np.uint8)
    done: list[None] = []
    source.gather(theirs, buffer, lambda: done.append(None))
    assert len(done) == 1
    unit = shape.block_bytes // shape.num_heads
    edges = [0, *(c * unit for c in sorted(cuts) if c * unit < buffer.size), buffer.size]
    for a, b in pairwise(edges):
        target.scatter_part(buffer[a:b], a, ours)
    whole.scatter(buffer, ours)
    for layer, (sent, landed) in enumerate(zip(theirs, ours, strict=True)):
        for block, head in np.ndindex(NUM_BLOCKS, num_heads):
            got = ranks[1].bytes_of(layer, block, head)
            assert (got == ranks[2].bytes_of(layer, block, head)).all()
            if block in landed:
                came_from = sent[landed.index(block)]
                assert (got == ranks[0].bytes_of(layer, came_from, head)).all()
            else:
                assert not got.any(), "no other block is touched"
    single = np.zeros(NUM_LAYERS * shape.block_bytes, np.uint8)
    source.gather_block([5, 2], single)
    target.scatter_block(single, [3, NULL_BLOCK])
    for head in range(num_heads):
        kept = ranks[0].bytes_of(0, 5, head)
        assert (ranks[1].bytes_of(0, 3, head) == kept).all()
        assert not ranks[1].bytes_of(1, NULL_BLOCK, head).any(), "the group does not need it"
    with pytest.raises(ValueError, match="need"):
        source.gather(theirs, buffer[:-1])


@pytest.mark.req("S3", "S126")
@given(
    num_heads=st.sampled_from((1, 2, 8, 32)),
    num_ranks=st.sampled_from((1, 2, 4)),
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(LAYOUTS),
)
def test_a_shapes_bytes_are_those_of_real_caches(
    num_heads: int, num_ranks: int, dtype: str, layout: tuple[str, str]
) -> None:
    """MHA and GQA differ only in the number of KV heads. The bytes of scales count, too."""
    scales = SCALE_BYTES if dtype == "int8" else 0
    named = {"float8_e4m3fn": "fp8_e4m3"}.get(dtype, dtype)
    mine = heads_of(num_heads, num_ranks, 0).count
    share = KvShape(NUM_LAYERS, mine, HEAD_DIM, named, scales)
    rank = Rank(layout, dtype, mine)
    assert layout_of(rank.caches, 5, "").total_bytes == share.kv_bytes(5 * TOKENS, TOKENS)
    real = sum(t.numel() * t.element_size() for t in rank.tensors.values())
    assert real == share.kv_bytes(NUM_BLOCKS * TOKENS, TOKENS)


def test_two_layouts_are_compatible_only_if_their_bytes_have_the_same_order() -> None:
    one = Rank(("kbnhc", "kbnhc"), "float16", 4)
    assert Rank(("bknhc", "bknhc"), "float16", 2).block == one.block
    assert Rank(("kbnhc", "kbhnc"), "float16", 1).block == one.block
    assert Rank(("bhnc", "bnhc"), "float16", 4).block != one.block
    assert Rank(("kbnhc", "kbnhc"), "float8_e4m3fn", 4).block != one.block
