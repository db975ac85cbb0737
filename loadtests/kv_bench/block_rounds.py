"""Runs the measurement of blocks.py.

Each round has every transport, prompt and mode once. Each transport has one pair of processes for
all rounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final

from loadtests.kv_bench import cases
from loadtests.kv_bench.cases import Paging
from loadtests.kv_bench.pair import Pair, pair
from pdmesh.core.kv.layout.buffer_layout import KvShape

_WIRE_REPEATS: Final = 8
_KIB: Final = (4, 12, 32, 128, 512)
NUM_LAYERS: Final = 16
SWEEP_BYTES: Final = 24 << 20  # a multiple of the blocks of all layers at each block size
TOKENS: Final = 1024
BLOCK_TOKENS: Final = 16
_SMOLLM2_SHAPE: Final = KvShape(num_layers=30, num_kv_heads=3, head_dim=64, dtype="bfloat16")
FREE: Final = (cases.CHUNKED, cases.LAYERS)
MODES: Final = (cases.BLOCKS_ACKED, cases.BLOCKS_PIPELINED, *FREE)


@dataclass(frozen=True, slots=True)
class Prompt:
    num_bytes: int
    paging: Paging

    @property
    def num_blocks(self) -> int:
        return self.num_bytes // self.paging.block_bytes


SWEEP: Final = tuple(Prompt(SWEEP_BYTES, Paging(NUM_LAYERS, kib << 10)) for kib in _KIB)
SMOLLM2: Final = Prompt(
    _SMOLLM2_SHAPE.kv_bytes(TOKENS, BLOCK_TOKENS),
    Paging(_SMOLLM2_SHAPE.num_layers, BLOCK_TOKENS * _SMOLLM2_SHAPE.token_layer_bytes),
)


@dataclass(frozen=True, slots=True)
class Row:
    """The result of one transfer. For the wire, it is one of several payloads in a row."""

    round: int
    transport: str
    num_bytes: int
    num_layers: int
    block_bytes: int
    mode: str
    total_ms: float
    block_ms: float | None
    block_p99_ms: float | None
    block_deviation_ms: float | None


def measure(
    transports: Sequence[str], rounds: int, within_s: float, say: Callable[[str], None]
) -> list[Row]:
    """The rows of all rounds except round 0.

    Round 0 checks the bytes, and warms up memory and connections.
    """
    rows: list[Row] = []
    ends = time.monotonic() + within_s
    prompts = (*SWEEP, SMOLLM2)
    with ExitStack() as stack:
        largest = max(prompt.num_bytes for prompt in prompts)
        pairs = {t: stack.enter_context(pair(t, largest)) for t in transports}
        for number in range(rounds + 1):
            if number > 1 and time.monotonic() > ends:
                break
            for transport, both in pairs.items():
                for prompt in prompts:
                    found = list(_once(both, number, transport, prompt))
                    rows += found if number else []
            say(f"round {number} of {rounds}")
    return rows


def _once(both: Pair, number: int, transport: str, prompt: Prompt) -> Iterator[Row]:
    for mode in (*MODES, cases.WIRE):
        sample = both.run(
            mode,
            prompt.num_bytes,
            repeats=_WIRE_REPEATS if mode == cases.WIRE else 1,
            is_verified=not number and mode != cases.WIRE,
            paging=prompt.paging,
        )
        yield Row(
            number,
            transport,
            prompt.num_bytes,
            prompt.paging.num_layers,
            prompt.paging.block_bytes,
            mode,
            sample.total_ms,
            sample.block_ms,
            sample.block_p99_ms,
            sample.block_deviation_ms,
        )
