"""An answer keeps its length if the ids of its tokens arrive late (S141)."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.v1.worker.gpu_input_batch")
torch = pytest.importorskip("torch")

from vllm.v1.worker.gpu_input_batch import InputBatch  # noqa: E402 - only with vLLM

from pdmesh.engine.vllm.connector.worker.draws.placeholders import (  # noqa: E402
    keep_placeholders,
)


@pytest.fixture
def unpatched() -> Iterator[Any]:
    update = InputBatch.update_async_output_token_ids
    yield update
    InputBatch.update_async_output_token_ids = update


def batch(answers: list[list[int]], sampled: list[list[int]]) -> Any:
    """A batch of the requests a, b and so on, which were all in the step before."""
    names = [chr(ord("a") + n) for n in range(len(answers))]
    return SimpleNamespace(
        req_ids=names,
        prev_req_id_to_index={name: n for n, name in enumerate(names)},
        sampled_token_ids_cpu=torch.tensor(sampled),
        async_copy_ready_event=SimpleNamespace(synchronize=lambda: None),
        sampling_metadata=SimpleNamespace(output_token_ids=answers),
    )


@pytest.mark.req("S141")
def test_an_answer_whose_ids_nobody_asked_for_keeps_its_length(unpatched: Any) -> None:
    """The second request needs token ids. So from now on, vLLM gets the ids of both requests."""
    answers = [[5, -1, -1, -1], [6, -1]]
    plain = [list(answer) for answer in answers]
    unpatched(batch(plain, [[8], [9]]))
    assert [len(answer) for answer in plain] == [2, 2], "vLLM counts right now: delete the patch"

    keep_placeholders()
    keep_placeholders()
    InputBatch.update_async_output_token_ids(batch(answers, [[8], [9]]))
    assert answers == [[5, -1, -1, 8], [6, 9]]


@pytest.mark.req("S141")
def test_a_batch_that_needs_no_ids_is_left_alone(unpatched: Any) -> None:
    keep_placeholders()
    empty = batch([], [])
    InputBatch.update_async_output_token_ids(empty)
    assert empty.sampling_metadata.output_token_ids == []
