"""The gateway finds repetitions at the same places as vLLM's scheduler."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("vllm.v1.core.sched.utils")

from vllm.sampling_params import RepetitionDetectionParams
from vllm.v1.core.sched.utils import check_sequence_repetition

from pdmesh.core.sampling.repetition import RepetitionFinder, RepetitionRule

pytestmark = pytest.mark.filterwarnings("ignore")  # importing vLLM raises warnings


def test_gateway_and_vllm_find_the_same_repetitions() -> None:
    rng = random.Random(2)
    num_found = 0
    for _ in range(200):
        size = rng.randrange(1, 6)
        rule = RepetitionRule(size, rng.randrange(size + 1), rng.randrange(2, 5))
        params = RepetitionDetectionParams(rule.max_size, rule.min_size, rule.min_count)
        finder, tokens = RepetitionFinder(rule), list[int]()
        for _ in range(24):
            tokens.append(rng.randrange(2))
            expected = check_sequence_repetition(tokens, params)
            assert finder.feed(tokens[-1]) == expected
            num_found += expected
    assert num_found > 200
