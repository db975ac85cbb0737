"""Sets token 1 of a request that vLLM got before the token was known (S48).

The scheduler holds such a request in WAITING_FOR_REMOTE_KVS, with a stand-in as the last token of
its prompt. Nothing reads the stand-in until the token is set: cached prefixes end before the last
token, blocks are named when they are computed, and the model gets the prompt with the first step.
There is one exception: if the prompt fills its last block, that block's hash includes the stand-in
and is computed again.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.request import Request

# tokens kept that arrived before their request; beyond this, the oldest is dropped, and its leg
# times out
MAX_EARLY = 1024


class EarlyRequests:
    """The requests at the scheduler that wait for token 1."""

    def __init__(self, hash_block_size: int) -> None:
        self._hash_block_size = hash_block_size
        self._waiting: dict[int, Request] = {}  # by leg
        self._came_first: OrderedDict[int, int] = OrderedDict()

    def add(self, leg: int, request: Request) -> bool:
        """Returns whether the request's token is already there."""
        token_id = self._came_first.pop(leg, None)
        if token_id is None:
            self._waiting[leg] = request
            return False
        self._put(request, token_id)
        return True

    def tell(self, leg: int, token_id: int) -> str | None:
        """Returns the key of the request that now has its token; None if it has not arrived."""
        request = self._waiting.pop(leg, None)
        if request is not None:
            self._put(request, token_id)
            return str(request.request_id)
        self._came_first[leg] = token_id
        if len(self._came_first) > MAX_EARLY:
            self._came_first.popitem(last=False)
        return None

    def drop(self, leg: int) -> None:
        self._waiting.pop(leg, None)

    def _put(self, request: Request, token_id: int) -> None:
        assert request.num_output_tokens == 0
        assert request.prompt_token_ids is not None
        request.prompt_token_ids[-1] = token_id
        request._all_token_ids[-1] = token_id
        if request.block_hashes and request.num_tokens % self._hash_block_size == 0:
            request.block_hashes.pop()
            request.update_block_hashes()
