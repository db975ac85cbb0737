"""Tokenizes the many texts of a call for vectors or scores, without delaying chats.

Equal texts of a call are encoded once. If the texts of a call have more than 2048 characters
together, they are divided into turns (pieces of work of bounded length), which run on a separate
thread. On this thread, the turns of different calls alternate, so that a call with megabytes of
text does not block other calls.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from itertools import islice
from typing import Final, TypeVar

from tokenizers import Encoding
from tokenizers import Tokenizer as HfTokenizer

from pdmesh.core.kv.prefix.block_hash import token_array
from pdmesh.core.pooling.truncation import Content, SpecialTokens, TextCut, content_of
from pdmesh.services.gateway.text.encoding_threads import EncodingQueues

_INLINE_CHARS: Final = 2048
_TURN_CHARS: Final = 131072
_TURN_TEXTS: Final = 256
_NUM_PROBES: Final = 64

T = TypeVar("T")
_Text = str | tuple[str, str]  # a text, or two parts that are joined just before they are encoded


class BulkTexts:
    """Encodes texts with one tokenizer.

    `max_token_chars` is the length of the longest token of the vocabulary.
    """

    def __init__(self, inner: HfTokenizer, queues: EncodingQueues, max_token_chars: int) -> None:
        self._inner, self._queues = inner, queues
        self.max_token_chars = max_token_chars

    def bounded(self, text: str, max_tokens: int, cut: TextCut | None) -> str:
        """Shorten the text to the most characters that `max_tokens` tokens can have.

        If `cut` drops the first tokens, the beginning of the text is dropped, otherwise the end.
        """
        most = max_tokens * self.max_token_chars
        if len(text) <= most:
            return text
        return text[-most:] if cut is not None and cut.side == "left" else text[:most]

    def bounded_pair(
        self, one: str, other: str, max_tokens: int, cut: TextCut | None
    ) -> tuple[str, str]:
        """Do the same as `bounded`, for two texts that will be joined."""
        most = max_tokens * self.max_token_chars
        if len(one) + len(other) <= most:
            return one, other
        if cut is not None and cut.side == "left":
            other = other[-most:]
            return one[len(one) - min(len(one), most - len(other)) :], other
        one = one[:most]
        return one, other[: most - len(one)]

    async def contents(
        self, texts: Sequence[_Text], *, cut: TextCut | None = None, is_lower_case: bool = False
    ) -> list[Content]:
        """The tokens of each text, without special tokens. Raises Overloaded."""
        encode = partial(self._contents, cut, is_lower_case)
        return await self._each(texts, encode)

    async def shortened(self, texts: Sequence[str], max_tokens: int) -> list[str]:
        """The beginning of each text, with at most `max_tokens` tokens besides special tokens.

        A text is cut between characters, which may change the tokens before the cut. So the cut
        text is encoded again, and cut again if it still has too many tokens. Raises Overloaded.
        """
        return await self._each(texts, partial(self._shortened, max_tokens))

    @cached_property
    def around_one(self) -> SpecialTokens:
        """The special tokens of an input of one text."""
        return next((s for p in self._probes() if (s := self._around(p)) is not None), _NO_TOKENS)

    @cached_property
    def around_two(self) -> SpecialTokens:
        """The special tokens of an input of two texts."""
        pairs = ((probe, probe) for probe in self._probes())
        return next((s for p in pairs if (s := self._around(p)) is not None), _NO_TOKENS)

    async def _each(
        self, texts: Sequence[_Text], work: Callable[[Sequence[_Text]], list[T]]
    ) -> list[T]:
        distinct = list(dict.fromkeys(texts))
        num_chars = sum(map(_size, distinct))
        if num_chars <= _INLINE_CHARS:
            found = work(distinct)
        else:
            turns = (partial(work, some) for some in _turns(distinct))
            found = await self._queues.in_turns(turns, num_chars)
        by_text = dict(zip(distinct, found, strict=True))
        return [by_text[text] for text in texts]

    def _contents(
        self, cut: TextCut | None, is_lower_case: bool, texts: Sequence[_Text]
    ) -> list[Content]:
        whole = [text if isinstance(text, str) else "".join(text) for text in texts]
        if is_lower_case:
            whole = [text.lower() for text in whole]
        found = self._inner.encode_batch_fast(whole, add_special_tokens=False)
        return [content_of(token_array(encoding.ids), cut) for encoding in found]

    def _shortened(self, max_tokens: int, texts: Sequence[_Text]) -> list[str]:
        """Shorten some texts.

        Even a single text is encoded as a batch. Only then does the library release the
        interpreter's lock, so that other threads can run.
        """
        kept = [text if isinstance(text, str) else "".join(text) for text in texts]
        places = [place for place, text in enumerate(kept) if text]
        while places:
            found = self._inner.encode_batch([kept[p] for p in places], add_special_tokens=False)
            long = [(p, e) for p, e in zip(places, found, strict=True) if len(e) > max_tokens]
            for place, encoding in long:
                kept[place] = _before(kept[place], encoding, max_tokens)
            places = [place for place, _ in long if kept[place]]
        return kept

    def _probes(self) -> Iterator[str]:
        """Texts to try in order. A vocabulary may have no token for some of them."""
        yield "a"
        yield from islice(self._inner.get_vocab(with_added_tokens=False), _NUM_PROBES)

    def _around(self, probe: str | tuple[str, str]) -> SpecialTokens | None:
        """The special tokens around the probe, or None if one of the probe's texts has no token."""
        (whole,) = self._inner.encode_batch([probe], add_special_tokens=True)
        owners: list[int | None] = whole.sequence_ids
        firsts = [place for place, owner in enumerate(owners) if owner == 0]
        seconds = [place for place, owner in enumerate(owners) if owner == 1]
        if not firsts or not (seconds or isinstance(probe, str)):
            return None
        ids, types = token_array(whole.ids), list(whole.type_ids)
        if not seconds:
            return SpecialTokens(before=ids[: firsts[0]], after=ids[firsts[-1] + 1 :])
        types = [
            *types[: firsts[0] + 1],
            *types[firsts[-1] + 1 : seconds[0] + 1],
            *types[seconds[-1] + 1 :],
        ]
        return SpecialTokens(
            ids[: firsts[0]],
            ids[firsts[-1] + 1 : seconds[0]],
            ids[seconds[-1] + 1 :],
            tuple(types),
        )


_NO_TOKENS: Final = SpecialTokens(array("I"), array("I"), array("I"), (0, 1))


def _size(text: _Text) -> int:
    return len(text) if isinstance(text, str) else len(text[0]) + len(text[1])


def _turns(texts: Sequence[_Text]) -> Iterator[Sequence[_Text]]:
    start = num_chars = 0
    for place, text in enumerate(texts):
        size = _size(text)
        is_full = place - start >= _TURN_TEXTS or num_chars + size > _TURN_CHARS
        if place > start and is_full:
            yield texts[start:place]
            start, num_chars = place, 0
        num_chars += size
    if start < len(texts):
        yield texts[start:]


def _before(text: str, encoding: Encoding, max_tokens: int) -> str:
    """The text of the first `max_tokens` tokens. It is always shorter than the whole text."""
    offsets = encoding.offsets
    end = min(offsets[max_tokens - 1][1], offsets[max_tokens][0])
    return text[: min(end, len(text) - 1)]
