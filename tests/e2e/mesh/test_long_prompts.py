"""A long prompt hardly slows the running decodes of its pair on vLLM (S82).

`make bench NAME=long-prompts` has the figures. This test measures two references in the same run.
In the first, the long prompts go to another pair, which shares only the machine. In the second,
prompts and decodes share the steps of one engine.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Final

import pytest

from loadtests.engine.long_prompts import (
    ALONE,
    BAR,
    BESIDE,
    ELSEWHERE,
    MODEL,
    measured,
    pairs_of,
    slower,
)

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.nightly,
    pytest.mark.timeout(1200),
    pytest.mark.filterwarnings("default"),  # vLLM emits warnings
]
NUM_ROUNDS: Final = 3
DURATION_S: Final = 12.0


@pytest.mark.req("S82")
async def test_a_long_prompt_costs_the_decodes_of_its_pair_no_more_than_those_of_another_pair(
    model_dir: Path,
) -> None:
    assert model_dir == MODEL
    pair = await measured("pair", NUM_ROUNDS, DURATION_S)
    engine = await measured("one engine", 1, DURATION_S)
    assert not [turn["errors"] for turn in pair + engine if turn["errors"]]
    beside = [turn for turn in pair + engine if turn["where"] != ALONE]
    assert all(turn["num_long"] for turn in beside), "no long prompt was computed meanwhile"
    own = statistics.median(slower("p99", two) for two in pairs_of(pair, "pair", BESIDE, ELSEWHERE))
    assert own <= BAR
    apart = statistics.median(slower("p50", two) for two in pairs_of(pair, "pair", BESIDE, ALONE))
    shared = statistics.median(
        slower("p50", two) for two in pairs_of(engine, "one engine", BESIDE, ALONE)
    )
    assert apart < shared / 4
