"""Writes log probabilities as OpenAI does: each token spelt, with its bytes and its place in the
text.

A token may be only part of a character. Then its `bytes` are its own, never those of a replacement
character, and it is spelt `bytes:\\xf0\\x9f`, as OpenAI does, so that no two such tokens look
alike.
"""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Sequence
from typing import Any, Final

from pdmesh.services.gateway.text.tokenizer import Tokenizer
from pdmesh.v1.common_pb2 import TokenLogprob

# Any: JSON objects on their way out.
Json = dict[str, Any]

_LEAST: Final = -9999.0  # what stands for a probability of 0: JSON has no infinity
_utf8: Final = getincrementaldecoder("utf-8")


class LogprobWriter:
    """Writes one choice's log probabilities, which come in pieces, in order.

    `prompt_ids`: the prompt that its text continues.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._is_first_of_text = not tokenizer.has_text(prompt_ids)
        self._characters = _utf8("replace")
        self._offset = 0  # whole characters so far

    def chat(self, logprobs: Sequence[TokenLogprob]) -> Json:
        """The form of /v1/chat/completions.

        `top_logprobs` are the likeliest tokens, which may include the drawn token.
        """
        return {
            "content": [
                {
                    **self._entry(lp.token_id, lp.logprob),
                    "top_logprobs": [
                        self._entry(token_id, logprob)
                        for token_id, logprob in zip(
                            lp.top_token_ids, lp.top_logprobs, strict=False
                        )
                    ],
                }
                for lp in logprobs
            ],
            "refusal": None,
        }

    def completion(self, logprobs: Sequence[TokenLogprob]) -> Json:
        """The form of /v1/completions: parallel arrays.

        `top_logprobs` always include the drawn token, so there may be one more.
        """
        return {
            "tokens": [_spelt(self._tokenizer.token_bytes(lp.token_id)) for lp in logprobs],
            "token_logprobs": [max(lp.logprob, _LEAST) for lp in logprobs],
            "top_logprobs": [self._top(lp) for lp in logprobs],
            "text_offset": [self._offset_of(lp.token_id) for lp in logprobs],
        }

    def _entry(self, token_id: int, logprob: float) -> Json:
        own = self._tokenizer.token_bytes(token_id)
        return {"token": _spelt(own), "logprob": max(logprob, _LEAST), "bytes": list(own)}

    def _top(self, lp: TokenLogprob) -> dict[str, float]:
        """Of tokens that are spelt alike the drawn one counts, else the likeliest."""
        found = {_spelt(self._tokenizer.token_bytes(lp.token_id)): max(lp.logprob, _LEAST)}
        for token_id, logprob in zip(lp.top_token_ids, lp.top_logprobs, strict=False):
            found.setdefault(_spelt(self._tokenizer.token_bytes(token_id)), max(logprob, _LEAST))
        return found

    def _offset_of(self, token_id: int) -> int:
        """Where the token begins in the text, in characters.

        For a token in the middle of a character: where that character begins.
        """
        begin = self._offset
        if self._tokenizer.has_text((token_id,)):
            own = self._tokenizer.shown_bytes(token_id, is_first_of_text=self._is_first_of_text)
            self._is_first_of_text = False
            self._offset += len(self._characters.decode(own))
        return begin


def _spelt(token: bytes) -> str:
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + token.decode("ascii", "backslashreplace")
