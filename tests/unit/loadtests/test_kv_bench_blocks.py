"""The KV benchmark with different block sizes.

Its report derives the cost of control and the utilisation, and says whether the required values are
reached.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from loadtests.kv_bench import cases
from loadtests.kv_bench.block_rounds import FREE, MODES, SMOLLM2, SWEEP, Prompt, Row
from loadtests.kv_bench.cases import Command, PagedCache, Paging
from loadtests.kv_bench.report.block_page import BlockFigures, markdown

MIB = 1 << 20


def rows_of(number: int, prompt: Prompt, total_ms: Mapping[str, float]) -> list[Row]:
    return [
        Row(
            number,
            "tcp",
            prompt.num_bytes,
            prompt.paging.num_layers,
            prompt.paging.block_bytes,
            mode,
            total_ms.get(mode, 10),
            *((0.1, 0.4, 0.2) if mode == cases.BLOCKS_ACKED else (None, None, None)),
        )
        for mode in (*MODES, cases.WIRE)
    ]


def run_of(acked_ms: Mapping[Prompt, float]) -> BlockFigures:
    """A round in which the wire and the block-free transfer take 10 ms each."""
    prompts = (*SWEEP, SMOLLM2)
    rows = [r for p in prompts for r in rows_of(1, p, {cases.BLOCKS_ACKED: acked_ms.get(p, 100.0)})]
    return BlockFigures(rows)


def rising(factor: float) -> BlockFigures:
    """Figures in which each block size takes `factor` times as long as the size before."""
    return run_of({prompt: 1000 * factor**i for i, prompt in enumerate(SWEEP)})


def test_smollm2s_block_is_k_and_v_of_sixteen_tokens_of_a_layer() -> None:
    """The config.json of SmolLM2 has 30 layers, 3 KV heads, and heads of 64 numbers of 16 bits."""
    assert SMOLLM2.paging == Paging(30, 2 * 16 * 3 * 64 * 2)
    assert SMOLLM2.num_blocks == 30 * 1024 // 16


@pytest.mark.parametrize("prompt", [*SWEEP, SMOLLM2], ids=lambda p: p.paging.block_bytes)
def test_each_prompt_is_whole_blocks_of_every_layer(prompt: Prompt) -> None:
    layout = cases.layout_of(prompt.num_bytes, prompt.paging)
    assert layout.num_layers * layout.num_blocks == prompt.num_blocks


def test_the_cost_of_a_block_besides_its_bytes_counts_as_control() -> None:
    prompt = SWEEP[0]
    rows = rows_of(1, prompt, {cases.BLOCKS_ACKED: 110, cases.WIRE: 10})
    rows += rows_of(2, prompt, {cases.BLOCKS_ACKED: 220, cases.WIRE: 20})
    figures = BlockFigures(rows)
    assert figures.control_us("tcp", prompt).low == pytest.approx(100e3 / prompt.num_blocks)
    assert figures.control_us("tcp", prompt).high == pytest.approx(200e3 / prompt.num_blocks)
    # the second round was twice as slow in all, so the share of the wire is the same
    share = figures.utilisation("tcp", prompt, cases.BLOCKS_ACKED)
    assert (share.low, share.high) == pytest.approx((10 / 110, 10 / 110))


@pytest.mark.parametrize(("factor", "is_met"), [(0.5, True), (1.0, False), (1.5, False)])
def test_utilisation_has_to_rise_with_each_larger_block(factor: float, is_met: bool) -> None:
    line = next(
        text for text in markdown(rising(factor), "command").splitlines() if "rises" in text
    )
    assert ("unmet" not in line) == is_met


@pytest.mark.parametrize(("acked_ms", "is_met"), [(20.0, True), (15.0, False)])
def test_the_bar_of_smollm2_is_the_ratio_of_block_free_to_block_by_block(
    acked_ms: float, is_met: bool
) -> None:
    text = markdown(run_of({SMOLLM2: acked_ms}), "command")
    lines = [line for line in text.splitlines() if "<= 0.54" in line]
    assert len(lines) == len(FREE)
    assert all(("unmet" not in line) == is_met for line in lines)


def test_a_command_reaches_a_worker_with_its_paging() -> None:
    data = {"mode": cases.CHUNKED, "num_bytes": MIB, "serial": 1}
    asked = Command.from_json(data | {"paging": {"num_layers": 2, "block_bytes": 4096}})
    assert asked.paging == Paging(2, 4096)


def test_a_cache_has_blocks_of_its_own_size() -> None:
    """The largest prompt may have another shape, and need not end with a whole block of this
    cache.
    """
    cache = PagedCache(MIB, 1, Paging(3, 12 << 10))
    ids = cache.take(3 * (12 << 10) * 5)
    blocks = cache.blocks(ids)
    assert [block.nbytes for block in blocks] == [12 << 10] * 15
    assert len({cache.digest(ids), cache.digest(ids[::-1])}) == 2
