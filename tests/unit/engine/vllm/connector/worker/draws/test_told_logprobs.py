"""A request for the logprobs of named token ids does not change other answers of the batch."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm.v1.sample.sampler")

import torch
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.sampler import Sampler

from pdmesh.engine.vllm.connector.worker.draws.told_logprobs import with_likeliest

pytestmark = pytest.mark.filterwarnings("ignore")  # importing vLLM raises warnings
NUM_ROWS = 4


@pytest.mark.parametrize("ids", [{1: [5, 6]}, {0: [1], 3: list(range(30))}])
@pytest.mark.parametrize("vocab_size", [40, 12])
def test_each_row_has_the_logprobs_that_its_request_asked_for(
    ids: dict[int, list[int]], vocab_size: int
) -> None:
    ids = {row: [each for each in asked if each < vocab_size] for row, asked in ids.items()}
    torch.manual_seed(3)
    logprobs = torch.randn(NUM_ROWS, vocab_size).log_softmax(dim=-1)
    sampled = torch.tensor([3, 2, 1, 0])
    width = 1 + max(map(len, ids.values()))
    told = torch.zeros(NUM_ROWS, width, dtype=torch.int32)
    values = torch.full((NUM_ROWS, width), float("-inf"))
    told[:, 0], values[:, 0] = sampled, logprobs[range(NUM_ROWS), sampled]
    for row, asked in ids.items():
        told[row, 1 : len(asked) + 1] = torch.tensor(asked)
        values[row, 1 : len(asked) + 1] = logprobs[row, asked]
    found = LogprobsTensors(told.clone(), values.clone(), torch.zeros(NUM_ROWS))
    kept: Any = with_likeliest(found, logprobs, ids)
    plain = Sampler.gather_logprobs(logprobs, min(20, vocab_size), token_ids=sampled)
    for row in range(NUM_ROWS):
        expected: Any = (told, values) if row in ids else (plain.logprob_token_ids, plain.logprobs)
        size = expected[0].shape[1]
        assert kept.logprob_token_ids[row, :size].tolist() == expected[0][row].tolist()
        assert kept.logprobs[row, :size].tolist() == expected[1][row].tolist()


def test_nothing_changes_if_all_requests_ask_for_logprobs_by_token_id() -> None:
    found = LogprobsTensors(torch.zeros(1, 2), torch.zeros(1, 2), torch.zeros(1))
    assert with_likeliest(found, torch.zeros(1, 9), {0: [4]}) is found
