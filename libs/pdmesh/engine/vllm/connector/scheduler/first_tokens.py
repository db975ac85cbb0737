"""Sets token 1 of a request that vLLM gets before the token is known (S48).

An early decode begins to pull a prompt's KV while prefill still computes it. Until prefill draws
token 1, the decode's prompt ends with a stand-in for it. vLLM's scheduler keeps the request in
WAITING_FOR_REMOTE_KVS until this module sets the token. Nothing reads the stand-in before that:
cached prefixes end before the last token, blocks are named when they are computed, and the model
gets the prompt with the request's first step. There is one exception. If the prompt fills its last
block, vLLM has hashed that block with the stand-in, so the hash is computed again.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.request import Request

# The most tokens that are kept for requests that have not arrived yet. Beyond this number, the
# oldest token is dropped, and its request times out.
MAX_EARLY = 1024


class EarlyRequests:
    """The requests that wait for token 1.

    A leg is the number of a request's stay on one instance.
    """

    def __init__(self, hash_block_size: int) -> None:
        self._hash_block_size = hash_block_size
        self._waiting: dict[int, Request] = {}  # by leg
        self._came_first: OrderedDict[int, int] = OrderedDict()

    def add(self, leg: int, request: Request) -> bool:
        """Returns whether the request's token had arrived before the request."""
        token_id = self._came_first.pop(leg, None)
        if token_id is None:
            self._waiting[leg] = request
            return False
        self._put(request, token_id)
        return True

    def tell(self, leg: int, token_id: int) -> str | None:
        """Returns vLLM's id of the request that now has its token.

        None if the request has not arrived.
        """
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
