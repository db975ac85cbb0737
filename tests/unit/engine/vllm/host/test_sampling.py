"""The sampling parameters for vLLM, and the log probabilities that vLLM returns."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pdmesh.engine.base import PromptLogprobs, Sampling
from pdmesh.engine.vllm.host.sampling import CONSTRAINT_FAILED, drawn, num_told, prompt_logprobs


def flat(rows: list[list[tuple[int, float, int]]]) -> Any:
    """Log probabilities in the form of vLLM's FlatLogprobs, whose first position is empty."""
    starts, ends = [0], [0]
    entries: list[tuple[int, float, int]] = []
    for row in rows:
        starts.append(len(entries))
        entries += row
        ends.append(len(entries))
    return SimpleNamespace(
        start_indices=starts,
        end_indices=ends,
        token_ids=[token for token, _, _ in entries],
        logprobs=[logprob for _, logprob, _ in entries],
        ranks=[rank for _, _, rank in entries],
    )


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([], PromptLogprobs(0, [], [], [])),
        ([[(5, -1.0, 3)], [(6, -2.0, 1)]], PromptLogprobs(0, [5, 6], [-1.0, -2.0], [3, 1])),
        (
            [[(5, -9.0, 40), (7, -0.5, 1), (8, -0.75, 2)]],
            PromptLogprobs(2, [5, 7, 8], [-9.0, -0.5, -0.75], [40]),
        ),
    ],
)
def test_each_token_comes_with_its_rank_and_the_likeliest_tokens(
    rows: list[list[tuple[int, float, int]]], expected: PromptLogprobs
) -> None:
    assert prompt_logprobs(flat(rows)) == expected


def test_prompt_logprobs_come_only_with_the_first_output() -> None:
    completion = SimpleNamespace(finish_reason=None, token_ids=[3], logprobs=None)
    first = SimpleNamespace(
        kv_transfer_params=None,
        outputs=[completion],
        num_cached_tokens=0,
        prompt_logprobs=flat([[(5, -1.0, 2)]]),
    )
    later = SimpleNamespace(
        kv_transfer_params=None, outputs=[completion], num_cached_tokens=0, prompt_logprobs=[]
    )
    found = drawn(1, first, None).prompt_logprobs
    assert found is not None
    assert found.ranks == [2]
    assert drawn(1, later, None).prompt_logprobs is None


@pytest.mark.parametrize(
    ("reason", "params", "is_error", "is_constraint_error"),
    [
        ("error", {CONSTRAINT_FAILED: True}, True, True),
        ("error", None, True, False),
        ("length", {CONSTRAINT_FAILED: True}, False, False),
    ],
)
def test_an_error_shows_whether_the_constraint_is_its_cause(
    reason: str, params: Any, is_error: bool, is_constraint_error: bool
) -> None:
    completion = SimpleNamespace(finish_reason=reason, token_ids=[3], logprobs=None)
    output: Any = SimpleNamespace(
        outputs=[completion], num_cached_tokens=0, prompt_logprobs=None, kv_transfer_params=params
    )
    found = drawn(1, output, None)
    assert (found.is_error, found.is_constraint_error) == (is_error, is_constraint_error)


def test_the_logprobs_of_requested_token_ids_come_in_the_order_of_vllm() -> None:
    """The drawn token comes first, and is not repeated if the client requested it, too."""
    values = {7: -2.0, 9: -0.5, 4: -3.0}
    choices = {token: SimpleNamespace(logprob=value) for token, value in values.items()}
    completion = SimpleNamespace(finish_reason=None, token_ids=[7], logprobs=[choices])
    output: Any = SimpleNamespace(
        outputs=[completion], num_cached_tokens=0, prompt_logprobs=None, kv_transfer_params=None
    )
    named = num_told(Sampling(5, num_logprobs=2, logprob_token_ids=(9, 4, 7)))
    assert drawn(1, output, named).logprobs[0].top == ((7, -2.0), (9, -0.5), (4, -3.0))
    likeliest = num_told(Sampling(5, num_logprobs=2))
    assert drawn(1, output, likeliest).logprobs[0].top == ((9, -0.5), (7, -2.0))
