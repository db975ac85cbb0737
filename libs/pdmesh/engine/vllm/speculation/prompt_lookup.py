"""Proposes tokens by prompt lookup, as a proposer for vLLM's method `custom_class`.

Prompt lookup proposes the text that follows an earlier place of the same text. vLLM's own n-gram
proposer searches each request's whole text in each step. This proposer keeps for each request a
`CopyCursor`, the place in its text to copy from. vLLM tells a proposer neither which requests are
in the batch nor how many tokens the step's schedule allows. Both are read from vLLM's model runner.
A lost or wrong cursor leads only to a worse proposal, because the model checks each token.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pdmesh.core.speculation.copy_cursor import CopyCursor
from pdmesh.engine.vllm.sampling_extras import num_drawn_before

# If a cursor lacks more than this many tokens of its text, a new cursor is made by a search with
# numpy, which is faster than adding the tokens one by one.
MAX_BEHIND: Final = 1024
MAX_TEXT: Final = 1 << 17  # at least this many of a text's last tokens are searched


class PromptLookup:
    """The types are Any because vLLM's configuration and states have no stable types."""

    def __init__(self, vllm_config: Any) -> None:
        self._max_model_len: int = vllm_config.model_config.max_model_len
        self._cursors: dict[str, CopyCursor] = {}
        self._request_ids: Sequence[str] = ()
        self._requests: Mapping[str, Any] = {}
        self._num_tokens = 0

    def load_model(self, model: Any) -> None:
        """Patch vLLM's model runner. There is no model to load.

        At this call, vLLM has imported its runner, so that the runner can be patched.
        """
        tell_proposer_of_steps()

    def begin_step(
        self, request_ids: Sequence[str], requests: Mapping[str, Any], num_tokens: int
    ) -> None:
        """A step begins.

        `request_ids` are the requests of the batch by row, and `requests` are all requests that
        vLLM's runner knows. Each row may propose `num_tokens` tokens.
        """
        self._request_ids, self._requests, self._num_tokens = request_ids, requests, num_tokens
        for gone in self._cursors.keys() - requests.keys():
            del self._cursors[gone]

    def propose(
        self,
        drawn: Sequence[Sequence[int]],
        num_tokens: NDArray[np.int32],
        texts: NDArray[np.int32],
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Returns each row's proposed tokens.

        `drawn` has the tokens that this step drew in each row, none while a prompt is computed.
        `texts` has each row's text, whose length is in `num_tokens`.
        """
        proposals: list[list[int]] = []
        for row, tokens in enumerate(drawn):
            end = int(num_tokens[row])
            num = min(self._num_tokens, self._room(row, end)) if tokens else 0
            proposals.append(self._cursor(row, texts[row, :end]).propose(num) if num > 0 else [])
        return proposals

    def _room(self, row: int, end: int) -> int:
        """How many proposed tokens the answer has room for.

        The step that checks them draws one more token, which is not counted here. More tokens would
        need blocks that the request's admission has not counted (S49).
        """
        state = self._requests[self._request_ids[row]]
        params = state.sampling_params
        num_left = params.max_tokens + num_drawn_before(params) - len(state.output_token_ids)
        return min(self._max_model_len - end, int(num_left)) - 1

    def _cursor(self, row: int, text: NDArray[np.int32]) -> CopyCursor:
        request_id = self._request_ids[row]
        cursor = self._cursors.get(request_id)
        num_behind = len(text) - len(cursor) if cursor is not None else -1
        if cursor is None or not 0 <= num_behind <= MAX_BEHIND:
            num_drawn = len(self._requests[request_id].output_token_ids)
            cursor = self._cursors[request_id] = CopyCursor(text, num_drawn, MAX_TEXT)
        elif num_behind:
            cursor.extend(text[-num_behind:].tolist())
        return cursor


def tell_proposer_of_steps() -> None:
    """Patch the model runner of this process. Idempotent."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    propose = GPUModelRunner.propose_draft_token_ids
    if getattr(propose, "tells_steps", False):
        return

    @functools.wraps(propose)
    def propose_in_step(runner: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        runner.drafter.begin_step(
            runner.input_batch.req_ids,
            runner.requests,
            scheduler_output.num_spec_tokens_to_schedule,
        )
        return propose(runner, scheduler_output, *args, **kwargs)

    propose_in_step.tells_steps = True  # type: ignore[attr-defined]
    GPUModelRunner.propose_draft_token_ids = propose_in_step
