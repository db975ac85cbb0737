"""The token after a proposal that was accepted as a whole, drawn by vLLM's own sampler."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
pytest.importorskip("vllm")
torch = pytest.importorskip("torch")

pytestmark = pytest.mark.filterwarnings("default")  # vLLM itself raises these warnings
STOP, OTHER, VOCABULARY = 7, 9, 10


def drawn(min_tokens: list[int], outputs: list[list[int]], proposed: list[list[int]]) -> list[int]:
    """The tokens that the sampler draws for the rows, if the model prefers the stop token."""
    from vllm import SamplingParams
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.logits_processor.builtin import MinTokensLogitsProcessor
    from vllm.v1.sample.logits_processor.interface import BatchUpdate
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.sample.sampler import Sampler

    processor = MinTokensLogitsProcessor(SimpleNamespace(), torch.device("cpu"), False)
    added = [
        (
            row,
            SamplingParams(
                min_tokens=least, max_tokens=20, stop_token_ids=[STOP], detokenize=False
            ),
            [1],
            output,
        )
        for row, (least, output) in enumerate(zip(min_tokens, outputs, strict=True))
    ]
    update: Any = BatchUpdate(batch_size=len(added), removed=[], added=added, moved=[])
    processor.update_state(update)
    logits = torch.zeros(len(outputs), VOCABULARY)
    logits[:, STOP], logits[:, OTHER] = 5, 1
    metadata = SamplingMetadata(
        temperature=None,
        all_greedy=True,
        all_random=False,
        top_p=None,
        top_k=None,
        generators={},
        max_num_logprobs=None,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=torch.zeros(1),
        presence_penalties=torch.zeros(1),
        repetition_penalties=torch.ones(1),
        output_token_ids=outputs,
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors([processor]),
        spec_token_ids=proposed,
    )
    before = [each.tolist() for each in processor.logits_slice]
    told = Sampler()(logits=logits, sampling_metadata=metadata, predict_bonus_token=True)
    assert [each.tolist() for each in processor.logits_slice] == before
    tokens: list[int] = told.sampled_token_ids.flatten().tolist()
    return tokens


@pytest.mark.req("S116")
def test_an_answer_that_is_long_enough_with_its_proposal_may_end() -> None:
    from vllm.v1.sample.sampler import Sampler

    from pdmesh.engine.vllm.speculation.bonus_token import count_proposed_tokens

    rows: Any = ([3, 6, 7, 3], [[1, 2], [1, 2], [1, 2], [1, 2]], [[3, 4, 5, 6]] * 3 + [[]])
    unpatched = Sampler.apply_logits_processors
    if not getattr(unpatched, "counts_proposed", False):
        assert drawn(*rows) == [OTHER] * 4, "vLLM counts them itself: remove the patch"
    try:
        count_proposed_tokens()
        count_proposed_tokens()
        # Tokens 3 to 6 are proposed, so the drawn token is the seventh. In the last row it is the
        # third.
        assert drawn(*rows) == [STOP, STOP, OTHER, OTHER]
    finally:
        Sampler.apply_logits_processors = unpatched
