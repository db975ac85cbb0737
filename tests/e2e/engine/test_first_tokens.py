"""Token 1 replaces its placeholder in vLLM's request.

With KV handed over per layer, a decode starts before the prefill has drawn token 1. So its prompt
ends in a placeholder.
"""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.req("S48"),
    pytest.mark.filterwarnings("default"),  # vLLM emits warnings
]

BLOCK = 4


def request(prompt: list[int]) -> Any:
    """A request object of vLLM. The import is late because it is slow and emits warnings."""
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK, sha256)
    return Request("k", prompt, SamplingParams(max_tokens=4), None, block_hasher=hasher)


@pytest.mark.parametrize("length", [3, 4, 5, 8])
@pytest.mark.parametrize("is_token_first", [False, True])
def test_the_request_looks_as_if_token_1_had_always_been_known(
    length: int, is_token_first: bool
) -> None:
    from pdmesh.engine.vllm.connector.scheduler.first_tokens import EarlyRequests

    prompt = list(range(10, 10 + length - 1))
    expected, early = request([*prompt, 77]), request([*prompt, 0])
    requests = EarlyRequests(BLOCK)
    if is_token_first:
        assert requests.tell(5, 77) is None
        assert requests.add(5, early)
    else:
        assert not requests.add(5, early)
        assert requests.tell(5, 77) == "k"
    assert early.prompt_token_ids == expected.prompt_token_ids
    assert list(early.all_token_ids) == list(expected.all_token_ids)
    assert early.block_hashes == expected.block_hashes
    early.append_output_token_ids([1, 2, 3, 4])
    expected.append_output_token_ids([1, 2, 3, 4])
    assert early.block_hashes == expected.block_hashes


def test_all_ranks_report_the_same_tokens() -> None:
    from pdmesh.engine.vllm.connector.scheduler.step_news import StepNews

    both = StepNews({1: 5}).aggregate(StepNews({1: 5, 2: 6}))
    assert both.first_tokens == {1: 5, 2: 6}
