"""Makes the text of one answer as its tokens arrive. Each step adds the text of the new tokens.

A token's text depends on the tokens before it. SentencePiece decoders remove the space at the
beginning of a text, and a character may be spread over several tokens. So each step decodes a few
earlier tokens together with the new tokens, and adds the difference. An incomplete character is
held back for up to 64 tokens. The result does not depend on how the tokens are divided into steps.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import filterfalse, islice
from typing import Final

import msgspec
from tokenizers import Tokenizer as HfTokenizer
from tokenizers import decoders

from pdmesh.core.sampling.stop_strings import StopText

_INCOMPLETE: Final = "\ufffd"
_AT_ONCE: Final = 64  # the most new tokens that are decoded together
_MAX_CONTEXT: Final = 8  # enough earlier tokens, since a character has at most four bytes
# The most tokens that are held back for an incomplete character. The text of this many tokens is
# shown as it is, because decoding ever more tokens at each step would take quadratic time.
_MAX_PENDING: Final = 64
# How vocabularies spell single bytes: SentencePiece as `<0x0A>`, GPT-2 as one character each.
_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_PLAIN: Final = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS: Final = tuple(byte for byte in range(256) if byte not in _PLAIN)
_BYTE_LEVEL: Final = {chr(byte): byte for byte in _PLAIN} | {
    chr(256 + place): byte for place, byte in enumerate(_OTHERS)
}


class TextRules(msgspec.Struct, frozen=True):
    """Which tokens of an answer become text, and which strings end it.

    A stop string ends an answer only after `min_tokens` tokens. With `is_stop_shown`, the stop
    string or end token is part of the text. `end_ids` are the tokens that end an answer.
    """

    stops: Sequence[str] = ()
    min_tokens: int = 0
    is_stop_shown: bool = False
    are_special_shown: bool = False
    end_ids: frozenset[int] = frozenset()


PLAIN: Final = TextRules()


class Detokenizer:
    """Decodes tokens. It leaves out special tokens unless `are_special_shown` is true.

    All streams of a tokenizer share a detokenizer.
    """

    def __init__(self, tokenizer: HfTokenizer, *, are_special_shown: bool = False) -> None:
        self._decode = partial(tokenizer.decode, skip_special_tokens=not are_special_shown)
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids: frozenset[int] = frozenset()  # tokens that are left out of the text
        if not are_special_shown:
            self.special_ids = frozenset(i for i, token in added.items() if token.special)
        # The caches refer to the tokenizer and not to this object. So there is no reference cycle,
        # and the tokenizer is freed as soon as the last stream of a dropped model has ended.
        lone = partial(_decode_lone, self._decode)
        self.lone_text = lru_cache(maxsize=16_384)(lone)
        # Whether the text of a token with whole characters is the same at any place of a text.
        self.is_additive = isinstance(tokenizer.decoder, decoders.ByteLevel)
        # `before` is a token of letters. `_own_bytes` decodes a token after it, because a decoder
        # may remove the space from the first token of a text.
        any_ids = range(tokenizer.get_vocab_size())
        before = next(([i] for i in any_ids if lone(i).isalpha()), [])
        self.own_bytes = lru_cache(maxsize=16_384)(partial(_own_bytes, tokenizer, before))

    def decode(self, ids: list[int]) -> str:
        return str(self._decode(ids))


def _decode_lone(decode: Callable[[list[int]], str], token_id: int) -> str:
    """The token's text, or "" if the text has an incomplete character."""
    text = str(decode([token_id]))
    return "" if _INCOMPLETE in text else text


def _own_bytes(tokenizer: HfTokenizer, before: list[int], token_id: int) -> bytes:
    """The bytes that the token, special or not, adds to a text.

    The bytes need not form whole characters.
    """
    known = tokenizer.decode(before, skip_special_tokens=False)
    text = str(tokenizer.decode([*before, token_id], skip_special_tokens=False))[len(known) :]
    if _INCOMPLETE not in text:
        return text.encode()
    token = tokenizer.id_to_token(token_id) or ""
    if found := _BYTE_TOKEN.fullmatch(token):
        return bytes((int(found[1], 16),))
    if all(char in _BYTE_LEVEL for char in token):
        return bytes(_BYTE_LEVEL[char] for char in token)
    return text.encode()


class TextStream:
    """The text of an answer to the prompt `prompt_ids`.

    `num_tokens` is the number of tokens that were fed so far, up to the end of a stop string.
    """

    __slots__ = (
        "_context", "_decoder", "_hidden_ids", "_known", "_min_tokens", "_pending", "_prompt_ids",
        "_shown", "_stops", "num_tokens",
    )  # fmt: skip

    def __init__(
        self, decoder: Detokenizer, prompt_ids: Sequence[int], rules: TextRules = PLAIN
    ) -> None:
        self._decoder = decoder
        self._hidden_ids = decoder.special_ids
        if not (rules.is_stop_shown or rules.end_ids <= decoder.special_ids):
            self._hidden_ids = decoder.special_ids | rules.end_ids
        self._min_tokens = rules.min_tokens
        self._prompt_ids: Sequence[int] | None = prompt_ids  # set until the first token
        self._stops = StopText(rules.stops, is_shown=rules.is_stop_shown) if rules.stops else None
        # The last tokens whose text was returned. At first these are the last of the prompt.
        self._context: list[int] = []
        self._shown = ""  # the text of `_context`
        self._pending: list[int] = []  # tokens that are held back, because their text is incomplete
        # Set if the prompt ends within a character: the text of `_context` and of the pending
        # tokens.
        self._known = ""
        self.num_tokens = 0

    @property
    def has_stops(self) -> bool:
        return self._stops is not None

    @property
    def is_stopped(self) -> bool:
        return self._stops is not None and self._stops.is_stopped

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the text."""
        return None if self._stops is None else self._stops.stopped_by

    def feed(self, token_ids: Sequence[int]) -> str:
        """Add tokens, and return the text that they complete."""
        if self._prompt_ids is not None:
            self._begin_after(self._prompt_ids)
            self._prompt_ids = None
        if self._stops is None:
            self.num_tokens += len(token_ids)
            if len(token_ids) == 1:
                return self._add_one(token_ids[0])
            return "".join(
                self._add(token_ids[begin : begin + _AT_ONCE])
                for begin in range(0, len(token_ids), _AT_ONCE)
            )
        parts: list[str] = []
        for token_id in token_ids:
            if self._stops.is_stopped:
                break
            self.num_tokens += 1
            if text := self._add_one(token_id):
                may_stop = self.num_tokens > self._min_tokens
                parts.append(self._stops.feed(text, may_stop=may_stop))
        return "".join(parts)

    def finish(self) -> str:
        """End the text, and return the rest that was held back.

        The rest was held back because a stop string or a character might have continued. An
        incomplete character is dropped.
        """
        rest = ""
        if self._pending:
            text = self._decoder.decode(self._context + self._pending)
            known = self._known or self._shown
            rest = text[len(known) :].rstrip(_INCOMPLETE) if text.startswith(known) else ""
        if self._stops is None:
            return rest
        may_stop = self.num_tokens > self._min_tokens
        return self._stops.feed(rest, may_stop=may_stop) + self._stops.flush()

    def _begin_after(self, prompt_ids: Sequence[int]) -> None:
        shown = filterfalse(self._decoder.special_ids.__contains__, reversed(prompt_ids))
        tail = [*islice(shown, _MAX_CONTEXT)][::-1]
        for num_pending in range(min(3, len(tail)) + 1):  # up to three bytes of a character
            end = len(tail) - num_pending
            self._set_context(tail[:end])
            if not self._shown.endswith(_INCOMPLETE):
                self._pending = tail[end:]
                break
        if self._pending:
            self._known = self._decoder.decode(self._context + self._pending)

    def _add(self, token_ids: Sequence[int]) -> str:
        """Add tokens all at once if all characters are whole, otherwise one by one.

        So the result does not depend on how the tokens are divided into steps.
        """
        hidden_ids = self._hidden_ids
        ids = [i for i in token_ids if i not in hidden_ids]
        text = self._decoder.decode([*self._context, *self._pending, *ids])
        if self._known or _INCOMPLETE in text or not text.startswith(self._shown):
            return "".join(map(self._add_one, ids))
        added = text[len(self._shown) :]
        self._set_context([*self._context, *self._pending, *ids])
        self._pending = []
        return added

    def _add_one(self, token_id: int) -> str:
        if token_id in self._hidden_ids:
            return ""
        pending, decoder = self._pending, self._decoder
        if decoder.is_additive and not pending and (text := decoder.lone_text(token_id)):
            self._context, self._shown = [token_id], text
            return text
        pending.append(token_id)
        text = decoder.decode([*self._context, *pending])
        is_incomplete = text.endswith(_INCOMPLETE) or self._shown.startswith(text)
        if is_incomplete and len(pending) < _MAX_PENDING:
            return ""
        shown = self._shown
        added = text[len(shown) :]
        if self._known or not text.startswith(shown):
            added = self._added(text)
            self._known = ""
        self._pending = []
        self._set_context(pending)
        return added

    def _added(self, text: str) -> str:
        """The new part of `text`, which is the text of the context and all pending tokens."""
        if self._known and text.startswith(self._known):
            return text[len(self._known) :]
        if text.startswith(self._shown):
            return text[len(self._shown) :]
        # Some pending bytes form no character, and have changed the decoded text before them. Only
        # the text after them is new.
        broken = self._decoder.decode(self._context + self._pending[:-1])
        if text.startswith(broken):
            return text[len(broken) :]
        pairs = enumerate(zip(text, self._shown, strict=False))
        num_alike = next((at for at, (new, old) in pairs if new != old), len(self._shown))
        return text[num_alike:]

    def _set_context(self, ids: list[int]) -> None:
        """Make the last tokens the context: as few as possible that form whole characters."""
        if ids and (text := self._decoder.lone_text(ids[-1])):
            self._context, self._shown = ids[-1:], text
            return
        for num in range(2, min(len(ids), _MAX_CONTEXT) + 1):
            context = ids[-num:]
            text = self._decoder.decode(context)
            if text and _INCOMPLETE not in text:
                self._context, self._shown = context, text
                return
        self._context = ids[-_MAX_CONTEXT:]
        self._shown = self._decoder.decode(self._context) if self._context else ""
