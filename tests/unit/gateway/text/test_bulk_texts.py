"""The input texts for vectors and scores are encoded once, without delaying the texts of chats."""

from __future__ import annotations

import asyncio
import threading
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import BertProcessing

from pdmesh.core.pooling.truncation import SpecialTokens, TextCut
from pdmesh.errors import Overloaded
from pdmesh.services.gateway.text.bulk_texts import BulkTexts
from pdmesh.services.gateway.text.encoding_threads import EncodingJob, EncodingQueues
from tests.support.waiting import until

WORDS = {"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "paris": 3, "is": 4, "big": 5}
LONG = "paris is " * 10_000


class Counting:
    """A real tokenizer that records the lengths of its texts, and waits for `gate`."""

    def __init__(self, *, has_special: bool = True) -> None:
        self._inner = Tokenizer(WordLevel(WORDS, unk_token="[UNK]"))
        self._inner.pre_tokenizer = WhitespaceSplit()
        if has_special:
            self._inner.post_processor = BertProcessing(("[SEP]", 2), ("[CLS]", 1))
        self.sizes: list[int] = []
        self.gate = threading.Event()
        self.gate.set()

    def encode_batch_fast(self, texts: Sequence[str], add_special_tokens: bool) -> Any:
        self.sizes += map(len, texts)
        assert self.gate.wait(60)
        return self._inner.encode_batch_fast(texts, add_special_tokens=add_special_tokens)

    def encode_batch(self, texts: Sequence[Any], add_special_tokens: bool) -> Any:
        """Of the library's other methods, only this one lets other threads run during the call."""
        return self._inner.encode_batch(texts, add_special_tokens=add_special_tokens)

    def get_vocab(self, with_added_tokens: bool) -> dict[str, int]:
        return self._inner.get_vocab(with_added_tokens)


@pytest.fixture
def queues() -> Iterator[EncodingQueues]:
    queues = EncodingQueues(1, max_pending_chars=200_000)
    yield queues
    queues.close()


def bulk_of(inner: Counting, queues: EncodingQueues) -> BulkTexts:
    return BulkTexts(inner, queues, max_token_chars=5)  # type: ignore[arg-type]


async def test_a_text_that_is_asked_for_often_is_encoded_once(queues: EncodingQueues) -> None:
    inner = Counting()
    found = await bulk_of(inner, queues).contents(["big", LONG, "big", LONG, "paris"])
    assert sorted(inner.sizes) == [3, 5, len(LONG)]
    assert [c.length for c in found] == [1, 20_000, 1, 20_000, 1]
    assert list(found[0].tokens) == [5]


async def test_only_tokens_that_an_input_may_have_are_kept(queues: EncodingQueues) -> None:
    bulk = bulk_of(Counting(), queues)
    (found,) = await bulk.contents([LONG], cut=TextCut(3))
    assert (list(found.tokens), found.length) == ([3, 4, 3], 20_000)
    (found,) = await bulk.contents([LONG], cut=TextCut(3, "left"))
    assert list(found.tokens) == [4, 3, 4]


async def test_a_call_with_much_text_delays_no_chat_and_has_its_own_bound(
    queues: EncodingQueues,
) -> None:
    inner = Counting()
    inner.gate.clear()
    call = asyncio.create_task(bulk_of(inner, queues).contents([LONG, f"{LONG}big"]))
    await until(lambda: bool(inner.sizes))
    chat = await queues.encode(
        lambda jobs: [array("I", [len(j.text)]) for j in jobs], EncodingJob("x" * 150_000)
    )
    assert list(chat) == [150_000]
    with pytest.raises(Overloaded):
        await bulk_of(inner, queues).contents([LONG])
    inner.gate.set()
    assert [c.length for c in await call] == [20_000, 20_001]
    assert queues.num_bulk_chars == 0


async def test_calls_take_turns_and_one_that_is_given_up_takes_no_more(
    queues: EncodingQueues,
) -> None:
    inner = Counting()
    inner.gate.clear()
    long = asyncio.create_task(bulk_of(inner, queues).contents([LONG, f"{LONG}big"]))
    await until(lambda: len(inner.sizes) == 1)
    gone = asyncio.create_task(bulk_of(inner, queues).contents(["is " * 1000]))
    other = asyncio.create_task(bulk_of(inner, queues).contents(["big " * 1000]))
    await until(lambda: queues.num_bulk_chars == 2 * len(LONG) + 3 + 3000 + 4000)
    gone.cancel()
    await asyncio.wait([gone])
    inner.gate.set()
    await asyncio.gather(long, other)
    assert inner.sizes == [len(LONG), 4000, len(LONG) + 3]
    assert queues.num_bulk_chars == 0


async def test_two_texts_are_joined_only_for_their_turn(queues: EncodingQueues) -> None:
    inner = Counting()
    found = await bulk_of(inner, queues).contents([("paris ", "is"), ("paris ", "big big")])
    assert [list(c.tokens) for c in found] == [[3, 4], [3, 5, 5]]


async def test_special_tokens_are_those_of_the_tokenizer(queues: EncodingQueues) -> None:
    bulk = bulk_of(Counting(), queues)
    one, two = bulk.around_one, bulk.around_two
    assert (list(one.before), list(one.after)) == ([1], [2])
    parts = (two.before, two.between, two.after)
    assert [list(part) for part in parts] == [[1], [2], [2]]
    assert two.types == (0, 0, 0, 1, 1)
    plain = bulk_of(Counting(has_special=False), queues)
    assert len(plain.around_one) == len(plain.around_two) == 0
    assert plain.around_two.types == (0, 1)
    assert len(SpecialTokens()) == 0


@pytest.mark.parametrize(
    ("text", "limit", "kept"),
    [("paris is big", 2, "paris is"), ("paris", 2, "paris"), ("", 2, ""), (LONG, 1, "paris")],
)
async def test_a_text_is_shortened_between_its_words(
    queues: EncodingQueues, text: str, limit: int, kept: str
) -> None:
    found = await bulk_of(Counting(), queues).shortened(["is", text], limit)
    assert found == ["is", kept]


def test_text_beyond_what_any_input_can_hold_is_cut_before_it_is_encoded(
    queues: EncodingQueues,
) -> None:
    bulk = bulk_of(Counting(), queues)
    assert bulk.bounded("x" * 30 + "y", 6, TextCut(3)) == "x" * 30
    assert bulk.bounded("x" * 30 + "y", 6, TextCut(3, "left")) == "x" * 29 + "y"
    assert bulk.bounded_pair("x" * 20, "y" * 20, 6, TextCut(3)) == ("x" * 20, "y" * 10)
    assert bulk.bounded_pair("x" * 20, "y" * 20, 6, TextCut(3, "left")) == ("x" * 10, "y" * 20)
    assert bulk.bounded_pair("x" * 40, "y" * 20, 6, None) == ("x" * 30, "")
