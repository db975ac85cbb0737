"""Writes log probabilities in OpenAI's format: each token as text, with its bytes or its offset.

A token may be only a part of a character. In this case, `bytes` has the token's real bytes, not the
bytes of a replacement character. The text is written as `bytes:\\xf0\\x9f`, as in OpenAI's API, so
that two such tokens never look the same.
"""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Iterator, Sequence
from typing import Any, Final

from pdmesh.services.gateway.text.tokenizer import Tokenizer
from pdmesh.v1.common_pb2 import PromptLogprobs, TokenLogprob

# A JSON object to be encoded, with values of any type.
Json = dict[str, Any]

_LEAST: Final = -9999.0  # the logarithm written for a probability of 0, as JSON has no infinity
_utf8: Final = getincrementaldecoder("utf-8")
_INCOMPLETE: Final = "\ufffd"
_MAX_BYTES: Final = 4  # of one character in UTF-8
# A token of the prompt or the answer with its log probability, and the likeliest tokens there.
_Entry = tuple[int, float, Sequence[int], Sequence[float]]


class LogprobWriter:
    """Writes the log probabilities of one answer, which are passed in pieces and in order.

    `prompt_ids` is the prompt that the answer's text continues. The prompt is not part of the text.
    With `spells_ids`, a token is written as `token_id:5`, as in vLLM, instead of its text.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int], *, spells_ids: bool = False
    ) -> None:
        self._tokenizer = tokenizer
        self._spells_ids = spells_ids
        self._is_first_of_text = not tokenizer.has_text(prompt_ids)
        self._characters = _utf8("replace")
        self._offset = 0  # the number of whole characters so far

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

        `top_logprobs` always include the drawn token, so there may be one more than asked for.
        """
        return {
            "tokens": [self._spelt(lp.token_id) for lp in logprobs],
            "token_logprobs": [max(lp.logprob, _LEAST) for lp in logprobs],
            "top_logprobs": [
                self._top((lp.token_id, lp.logprob, lp.top_token_ids, lp.top_logprobs))
                for lp in logprobs
            ],
            "text_offset": [self._offset_of(lp.token_id) for lp in logprobs],
        }

    def echoed(self, prompt_ids: Sequence[int], echo: str, found: PromptLogprobs | None) -> Json:
        """The form of `completion` for the tokens of an echoed prompt.

        `echo` is the prompt's text, with which the answer begins. This text may lack special tokens
        of the prompt. The first token has no log probability.
        """
        entries = list(_entries(found)) if found is not None else []
        none = [None] * (len(prompt_ids) - len(entries))
        return {
            "tokens": [self._spelt(token_id) for token_id in prompt_ids],
            "token_logprobs": [*none, *(max(logprob, _LEAST) for _, logprob, _, _ in entries)],
            "top_logprobs": [*none, *map(self._top, entries)],
            "text_offset": [self._offset_in(token_id, echo) for token_id in prompt_ids],
        }

    def _entry(self, token_id: int, logprob: float) -> Json:
        own = self._tokenizer.token_bytes(token_id)
        return {"token": self._spelt(token_id), "logprob": max(logprob, _LEAST), "bytes": list(own)}

    def _top(self, entry: _Entry) -> dict[str, float]:
        """The log probabilities of the entry's token and of the likeliest tokens, by text.

        If several tokens have the same text, the entry's token is used, or else the likeliest.
        """
        token_id, logprob, top_ids, top_logprobs = entry
        found = {self._spelt(token_id): max(logprob, _LEAST)}
        for token_id, logprob in zip(top_ids, top_logprobs, strict=False):
            found.setdefault(self._spelt(token_id), max(logprob, _LEAST))
        return found

    def _spelt(self, token_id: int) -> str:
        if self._spells_ids:
            return f"token_id:{token_id}"
        return _spelt(self._tokenizer.token_bytes(token_id))

    def _offset_of(self, token_id: int) -> int:
        """The offset at which the token begins in the text, in characters.

        A token in the middle of a character has the offset of that character.
        """
        begin = self._offset
        if self._tokenizer.has_text((token_id,)):
            own = self._tokenizer.shown_bytes(token_id, is_first_of_text=self._is_first_of_text)
            self._is_first_of_text = False
            self._offset += len(self._characters.decode(own))
        return begin

    def _offset_in(self, token_id: int, echo: str) -> int:
        """As `_offset_of`, but for a token of a prompt. `echo` is the text of the whole prompt."""
        if self._tokenizer.has_text((token_id,)):
            return self._offset_of(token_id)
        begin = self._offset
        own = self._tokenizer.token_bytes(token_id).decode(errors="replace")
        if own and echo.startswith(own, begin):
            self._offset += len(own)
            self._is_first_of_text = False
        return begin


def prompt_logprobs(
    tokenizer: Tokenizer, prompt_ids: Sequence[int], found: PromptLogprobs
) -> list[Json | None]:
    """The prompt's log probabilities in vLLM's form.

    The item of a token maps token ids to log probabilities and ranks. The first item is None.
    """
    written: list[Json | None] = [None]
    entries = zip(_entries(found), found.ranks, strict=True)
    for at, ((token_id, logprob, top_ids, top_logprobs), rank) in enumerate(entries, start=1):
        before = prompt_ids[max(0, at - _MAX_BYTES) : at]
        ranked = [(token_id, logprob, rank)]
        ranked += [
            (top_id, top_logprob, place)
            for place, (top_id, top_logprob) in enumerate(
                zip(top_ids, top_logprobs, strict=True), start=1
            )
        ]
        written.append(
            {
                str(each): {
                    "logprob": max(value, _LEAST),
                    "rank": place,
                    "decoded_token": _decoded(tokenizer, each, before),
                }
                for each, value, place in ranked
            }
        )
    return written


def _entries(found: PromptLogprobs) -> Iterator[_Entry]:
    size = found.num_top + 1
    token_ids, logprobs = list(found.token_ids), list(found.logprobs)
    for begin in range(0, len(token_ids), size):
        own, end = begin + 1, begin + size
        yield token_ids[begin], logprobs[begin], token_ids[own:end], logprobs[own:end]


def _decoded(tokenizer: Tokenizer, token_id: int, before: Sequence[int]) -> str:
    """The token's text as in vLLM.

    If a character is spread over several tokens, the text of the last token is the character, and
    the other tokens have no text.
    """
    own = tokenizer.token_bytes(token_id)
    text = own.decode(errors="replace")
    if not text.endswith(_INCOMPLETE):
        return text
    pieces = [tokenizer.token_bytes(each) for each in before]
    for num in range(1, len(pieces) + 1):
        context = pieces[-num:]
        whole = (b"".join(context) + own).decode(errors="replace")
        if whole.endswith(_INCOMPLETE):
            continue
        while context and context[-1].decode(errors="replace").endswith(_INCOMPLETE):
            context.pop()
        return whole[len(b"".join(context).decode(errors="replace")) :]
    return ""


def _spelt(token: bytes) -> str:
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + token.decode("ascii", "backslashreplace")
