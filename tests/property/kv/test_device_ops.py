"""The device operators that gather and scatter KV blocks.

Their arithmetic runs on arrays. The kernels run in Triton's interpreter, if Triton is installed.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdmesh.core.kv.layout.head_blocks import HeadBlocks, head_blocks, opaque_blocks
from pdmesh.kv.device.operators import DeviceBlocks
from pdmesh.kv.device.words import (
    TILE_WORDS,
    buffer_word,
    cache_word,
    word_plan,
)
from tests.support.waiting import wait_until

Bytes = npt.NDArray[np.uint8]
NUM_LAYERS, NUM_BLOCKS = 3, 6
HAS_TRITON = importlib.util.find_spec("triton") is not None
if HAS_TRITON:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads this when a kernel is made


@st.composite
def caches(draw: st.DrawFn) -> HeadBlocks:
    """The cache of one layer, opaque or with a known layout, in any memory order."""
    if draw(st.booleans()):
        return opaque_blocks(NUM_BLOCKS, draw(st.sampled_from((8, 20, 7, 4096, 20_000))))
    axes, order = draw(
        st.sampled_from(
            (
                ("kbnhc", "kbnhc"),
                ("bknhc", "bknhc"),
                ("kbnhc", "kbhnc"),
                ("bhnc", "bnhc"),
                ("bhnc", "bhnc"),
            )
        )
    )
    counts = {
        "k": 2,
        "b": NUM_BLOCKS,
        "h": draw(st.integers(1, 4)),
        "n": draw(st.sampled_from((1, 4, 16))),
        "c": draw(st.sampled_from((3, 8, 64, 80))),
    }
    shape = [counts[a] for a in order]
    physical = np.zeros(shape, np.uint8).transpose([order.index(a) for a in axes])
    item = draw(st.sampled_from((1, 2, 4)))
    return head_blocks(axes, physical.shape, physical.strides, item)


def cache_bytes(where: HeadBlocks) -> int:
    return where.blocks.count * where.block_bytes


def by_runs(
    memory: list[Bytes], ids: list[int], where: HeadBlocks, layers: range, heads: range
) -> Bytes:
    """The expected result of a gather, copied run by run as the layout defines a head's block."""
    parts = [
        memory[layer][start : start + where.run_bytes]
        for layer in layers
        for head in heads
        for block in ids
        for start, _ in where.runs(block, head)
    ]
    return np.concatenate(parts)


def random_memory(where: HeadBlocks, seed: int) -> list[Bytes]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, cache_bytes(where), np.uint8) for _ in range(NUM_LAYERS)]


def on_arrays(
    memory: list[Bytes],
    ids: list[int],
    buffer: Bytes,
    where: HeadBlocks,
    heads: range,
    is_gather: bool,
) -> None:
    """Run the kernel's programs on arrays, with its functions `cache_word` and `buffer_word`."""
    plan = word_plan(where)
    kind = {8: np.uint64, 4: np.uint32, 2: np.uint16, 1: np.uint8}[plan.word_bytes]
    words_of_buffer = buffer.view(kind)
    for row in range(NUM_LAYERS * len(heads)):
        layer, head = row // len(heads), heads.start + row % len(heads)
        cache = memory[layer].view(kind)
        for place, block in enumerate(ids):
            for tile in range(plan.num_tiles):
                words = tile * TILE_WORDS + np.arange(TILE_WORDS)
                words = words[words < plan.head_words]
                at = block * plan.block_stride + head * plan.head_stride
                at = at + cache_word(
                    words, plan.run_words, plan.inner_count, plan.outer_stride, plan.inner_stride
                )
                to = buffer_word(row, place, len(ids), plan.head_words) + words
                if is_gather:
                    words_of_buffer[to] = cache[at]
                else:
                    cache[at] = words_of_buffer[to]


some_ids = st.lists(st.integers(0, NUM_BLOCKS - 1), min_size=1, max_size=4, unique=True)


@pytest.mark.req("S50", "S57")
@given(caches(), some_ids, st.integers(0, 99), st.data())
def test_the_programs_move_each_byte_of_the_requested_heads(
    where: HeadBlocks, ids: list[int], seed: int, data: st.DataObject
) -> None:
    first = data.draw(st.integers(0, where.heads.count - 1))
    heads = range(first, data.draw(st.integers(first + 1, where.heads.count)))
    memory = random_memory(where, seed)
    expected = by_runs(memory, ids, where, range(NUM_LAYERS), heads)
    buffer = np.zeros_like(expected)
    on_arrays(memory, ids, buffer, where, heads, is_gather=True)
    assert (buffer == expected).all()

    target_ids = list(reversed(ids))
    target = random_memory(where, seed + 1)
    others = [i for i in range(NUM_BLOCKS) if i not in ids]
    before = [cache.copy() for cache in target]
    on_arrays(target, target_ids, buffer, where, heads, is_gather=False)
    assert (by_runs(target, target_ids, where, range(NUM_LAYERS), heads) == expected).all()
    if others:
        every = range(where.heads.count)
        args = others, where, range(NUM_LAYERS), every
        assert (by_runs(target, *args) == by_runs(before, *args)).all(), "an unnamed block changed"


@pytest.mark.skipif(
    not HAS_TRITON, reason="Triton is not installed: its interpreter runs these kernels"
)
@pytest.mark.req("S50")
@settings(deadline=None, max_examples=25)
@given(caches(), some_ids, st.integers(0, 99), st.booleans())
def test_the_kernels_match_the_arithmetic(
    where: HeadBlocks, ids: list[int], seed: int, is_part: bool
) -> None:
    import torch

    memory = random_memory(where, seed)
    tensors = [torch.from_numpy(m) for m in memory]
    blocks = DeviceBlocks(tensors, where)
    layers, heads = (1, 2) if is_part else (0, NUM_LAYERS), (0, where.heads.count)
    index = torch.tensor(ids, dtype=torch.int64)
    expected = by_runs(memory, ids, where, range(layers[0], sum(layers)), range(sum(heads)))
    out = torch.zeros(len(expected), dtype=torch.uint8)
    blocks.gather(index, out, layers, heads)
    assert (out.numpy() == expected).all()
    target = random_memory(where, seed + 1)
    back = DeviceBlocks([torch.from_numpy(m) for m in target], where)
    back.scatter(out, index.flip(0), layers, heads)
    got = by_runs(target, ids[::-1], where, range(layers[0], sum(layers)), range(sum(heads)))
    assert (got == expected).all()
    with pytest.raises(ValueError, match="need"):
        blocks.gather(index, out[:-1], layers, heads)


@pytest.mark.skipif(
    not HAS_TRITON, reason="Triton is not installed: its interpreter runs these kernels"
)
@pytest.mark.req("S50")
def test_the_check_for_a_gpu_finds_right_and_wrong_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """`make gpu-check` does on the GPU the comparison that this test does in the interpreter."""
    import torch

    from loadtests.gpu_check import exact

    assert exact.check("cpu", num_rounds=1).is_right
    gather = DeviceBlocks.gather

    def with_a_wrong_byte(self: DeviceBlocks, ids: Any, out: torch.Tensor, *spans: Any) -> None:
        gather(self, ids, out, *spans)
        out[-1] += 1

    monkeypatch.setattr(DeviceBlocks, "gather", with_a_wrong_byte)
    assert exact.check("cpu", num_rounds=1).is_right is False


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed: it compiles without a GPU")
@pytest.mark.req("S50")
def test_the_kernels_compile_for_a_gpu() -> None:
    """The interpreter accepts code that the compiler refuses, so the test above is not enough."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.property.kv.compile_kernels"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(done.stdout.splitlines()) == 9


class OneStream:
    """Stands in for a stream or an event of a device that does all work at once."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def record(self, *_: object) -> None: ...

    def synchronize(self) -> None: ...

    def wait_stream(self, _: object) -> None: ...

    def wait_event(self, _: object) -> None: ...


@pytest.mark.skipif(
    not HAS_TRITON, reason="Triton is not installed: its interpreter runs these kernels"
)
@pytest.mark.req("S50", "S57")
@pytest.mark.parametrize("scratch_bytes", [0, 1, 5000, 1 << 20])
def test_device_caches_move_layers_parts_and_heads(
    scratch_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scratch buffer has any size. With size 0, the arena is on the device and needs no buffer.

    Stand-ins replace the streams. Overlapping copies need a GPU, so they are not tested here.
    """
    import torch

    from pdmesh.core.instance.arena import ArenaRange
    from pdmesh.engine.vllm.connector.worker.caches import PagedCaches
    from pdmesh.engine.vllm.connector.worker.device_caches import DeviceCaches
    from pdmesh.engine.vllm.connector.worker.host_caches import HostHeads
    from pdmesh.kv.device import copies as device_copies
    from pdmesh.kv.device.arena import DeviceArena
    from pdmesh.kv.transport.base import KvBytes
    from pdmesh.kv.transport.memory_access import host_view

    monkeypatch.setattr(device_copies, "SCRATCH_BYTES", scratch_bytes)
    for name in ("Stream", "Event", "stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, OneStream)
    monkeypatch.setattr(
        device_copies.DeviceCopies, "_ids", lambda self, ids: torch.tensor(ids, dtype=torch.int64)
    )
    shape = (2, NUM_BLOCKS, 4, 3, 8)
    rng = np.random.default_rng(1)

    def tensors() -> list[torch.Tensor]:
        return [
            torch.from_numpy(rng.integers(0, 1 << 15, shape, np.int16)) for _ in range(NUM_LAYERS)
        ]

    source, ids, target_ids = tensors(), [4, 1, 3], [0, 5, 2]
    strides = source[0].stride()
    where = head_blocks("kbnhc", shape, strides, 2)
    on_device, on_host = DeviceCaches(source, where), HostHeads(source, where)
    size = NUM_LAYERS * len(ids) * where.block_bytes
    ends: list[str] = []

    def arena_of(data: Bytes) -> KvBytes:
        """An arena with these bytes, in the memory that the device copies to and from."""
        if scratch_bytes:
            return data
        place = DeviceArena(data.size, "cpu").view(ArenaRange(0, data.size))
        place.fill(data.data)
        return place

    def both(move: Callable[[PagedCaches, KvBytes], None], size: int) -> Bytes:
        got, expected = np.zeros(size, np.uint8), np.zeros(size, np.uint8)
        place = arena_of(got)
        move(on_device, place)
        if not scratch_bytes:
            got[:] = np.frombuffer(host_view(place), np.uint8)
        move(on_host, expected)
        assert (got == expected).all()
        return got

    data = both(lambda caches, out: caches.gather(ids, out), size)
    both(lambda caches, out: caches.gather_layer(1, ids, out), size // NUM_LAYERS)
    on_device.gather(ids, arena_of(data), lambda: ends.append("gathered"))

    device_target, host_target = tensors(), tensors()
    for a, b in zip(device_target, host_target, strict=True):
        b.copy_(a)
    targets: list[PagedCaches] = [DeviceCaches(device_target, where), HostHeads(host_target, where)]
    unit = where.head_bytes
    for caches, landed in zip(targets, (arena_of(data), data), strict=True):
        caches.scatter(landed, target_ids, lambda: ends.append("scattered"))
        caches.scatter(landed[: size // 3], target_ids, heads=(1, 1))
        caches.scatter_part(landed[: 5 * unit], 4 * unit, target_ids)
        caches.scatter_part(landed[: 7 * unit], 5 * unit, target_ids, (1, 2))
        caches.scatter_part(landed[: size // NUM_LAYERS], size // NUM_LAYERS, target_ids)
    for a, b in zip(device_target, host_target, strict=True):
        assert torch.equal(a, b)
    wait_until(lambda: len(ends) == 3)


@pytest.mark.req("S50")
@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton: make kernels")
@pytest.mark.parametrize("size", [0, 1, 8, 13, 4096 * 8, 4096 * 8 + 8, 100_003])
def test_the_kernel_makes_the_checksum_that_the_host_makes(size: int) -> None:
    import torch

    from pdmesh.kv.device.digest import digest, finished
    from pdmesh.kv.device.digest_kernel import sums_of

    data = np.random.default_rng(size).integers(0, 256, size + 1, np.uint8)
    for part in (data[:size], data[1 : size + 1]):  # the second range may begin inside a word
        plain, weighted = sums_of(torch.from_numpy(part)).tolist()
        assert finished(plain, weighted, size) == digest(part)
