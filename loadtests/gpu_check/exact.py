"""Checks that gather and scatter move exactly the requested bytes, in every memory order (S50)."""

from __future__ import annotations

import numpy as np
import torch

from loadtests.gpu_check.finding import Finding
from pdmesh.core.kv.layout.head_blocks import HeadBlocks, head_blocks, opaque_blocks
from pdmesh.kv.device.operators import DeviceBlocks

NUM_LAYERS, NUM_BLOCKS = 4, 64
ORDERS = (
    ("kbnhc", "kbnhc"),
    ("bknhc", "bknhc"),
    ("kbnhc", "kbhnc"),
    ("bhnc", "bnhc"),
    ("bhnc", "bhnc"),
)


def layouts(rng: np.random.Generator) -> list[HeadBlocks]:
    """Layouts of one layer's cache: opaque blocks, and all memory orders with odd and even
    sizes.
    """
    found = [opaque_blocks(NUM_BLOCKS, size) for size in (7, 20, 4096, 20_000, 131_072)]
    for axes, order in ORDERS:
        for item in (1, 2, 4):
            for _ in range(4):
                counts = {
                    "k": 2,
                    "b": NUM_BLOCKS,
                    "h": int(rng.integers(1, 9)),
                    "n": int(rng.choice((1, 16, 64))),
                    "c": int(rng.choice((3, 64, 80, 128))),
                }
                physical = np.zeros([counts[a] for a in order], np.uint8)
                named = physical.transpose([order.index(a) for a in axes])
                found.append(head_blocks(axes, named.shape, named.strides, item))
    return found


def check(device: str = "cuda", num_rounds: int = 3) -> Finding:
    """Run all layouts. `device` may be "cpu" if Triton runs in its interpreter."""
    rng = np.random.default_rng(1)
    cases = layouts(rng) * num_rounds
    wrong = [where for where in cases if not _is_exact(where, rng, device)]
    claim = f"{len(cases)} gathers and scatters on random layouts; {len(wrong)} moved other bytes."
    return Finding("Operators", claim, not wrong)


def _is_exact(where: HeadBlocks, rng: np.random.Generator, device: str) -> bool:
    """Whether one gather and one scatter move the same bytes as copies on the host do."""
    ids = rng.permutation(NUM_BLOCKS)[: int(rng.integers(1, 17))].tolist()
    layers = (1, 2) if rng.integers(2) else (0, NUM_LAYERS)
    first = int(rng.integers(where.heads.count))
    heads = first, int(rng.integers(1, where.heads.count - first + 1))
    memory = _random_memory(where, rng)
    expected = _by_runs(memory, ids, where, layers, heads)
    out = torch.zeros(len(expected), dtype=torch.uint8, device=device)
    DeviceBlocks(_on_device(memory, device), where).gather(
        torch.tensor(ids, device=device), out, layers, heads
    )
    if not np.array_equal(out.cpu().numpy(), expected):
        return False
    target, target_ids = _random_memory(where, rng), ids[::-1]
    on_device = _on_device(target, device)
    DeviceBlocks(on_device, where).scatter(
        out, torch.tensor(target_ids, device=device), layers, heads
    )
    got = [cache.cpu().numpy() for cache in on_device]
    if not np.array_equal(_by_runs(got, target_ids, where, layers, heads), expected):
        return False
    others = [block for block in range(NUM_BLOCKS) if block not in ids]
    everything = (0, NUM_LAYERS), (0, where.heads.count)
    return np.array_equal(
        _by_runs(got, others, where, *everything), _by_runs(target, others, where, *everything)
    )


def _random_memory(where: HeadBlocks, rng: np.random.Generator) -> list[np.ndarray]:
    size = where.blocks.count * where.block_bytes
    return [rng.integers(0, 256, size, np.uint8) for _ in range(NUM_LAYERS)]


def _on_device(memory: list[np.ndarray], device: str) -> list[torch.Tensor]:
    return [torch.tensor(cache, device=device) for cache in memory]


def _by_runs(
    memory: list[np.ndarray],
    ids: list[int],
    where: HeadBlocks,
    layers: tuple[int, int],
    heads: tuple[int, int],
) -> np.ndarray:
    """The bytes that a gather must write, computed from the definition of a head's block."""
    return np.concatenate(
        [
            memory[layer][start : start + where.run_bytes]
            for layer in range(layers[0], sum(layers))
            for head in range(heads[0], sum(heads))
            for block in ids
            for start, _ in where.runs(block, head)
        ]
    )
