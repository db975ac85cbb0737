"""Tests how inputs of one or two texts are truncated, either as Hugging Face's tokenizers do or at
one end.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import BertProcessing

from pdmesh.core.kv.prefix.block_hash import token_array
from pdmesh.core.pooling.truncation import (
    Content,
    Side,
    SpecialTokens,
    TextCut,
    content_of,
    input_length,
    lengths_within,
    one_text,
    two_texts,
)

LENGTHS = st.integers(1, 40)
CLS, SEP = token_array([1]), token_array([2])
ONE = SpecialTokens(before=CLS, after=SEP)
TWO = SpecialTokens(CLS, SEP, SEP, (0, 0, 0, 1, 1))
FIRST, SECOND = token_array([10, 11, 12, 13]), token_array([20, 21])


def library() -> Tokenizer:
    words = {"[CLS]": 1, "[SEP]": 2} | {str(i): i for i in range(3, 30)}
    found = Tokenizer(WordLevel(words))
    found.pre_tokenizer = WhitespaceSplit()
    found.post_processor = BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    return found


def text(tokens: object) -> str:
    return " ".join(map(str, tokens))  # type: ignore[call-overload]


@given(LENGTHS, LENGTHS, st.integers(1, 90))
def test_the_lengths_are_those_of_the_library(first: int, second: int, room: int) -> None:
    tokenizer = Tokenizer(WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.enable_truncation(room, strategy="longest_first")
    types = tokenizer.encode("a " * first, "a " * second).type_ids
    assert lengths_within(first, second, room) == (types.count(0), types.count(1))


@given(LENGTHS, LENGTHS, st.integers(3, 90))
def test_inputs_are_those_of_the_library(first: int, second: int, max_tokens: int) -> None:
    """The inputs are also equal if `content_of` truncated each text first."""
    cut, tokenizer = TextCut(max_tokens), library()
    tokenizer.enable_truncation(max_tokens, strategy="longest_first")
    one, other = (token_array(3 + i % 20 for i in range(size)) for size in (first, second))
    wanted = tokenizer.encode(text(one))
    assert list(one_text(content_of(one, cut), ONE, cut)) == wanted.ids
    pair = two_texts(content_of(one, cut), content_of(other, cut), TWO, cut)
    wanted = tokenizer.encode(text(one), text(other))
    assert pair is not None
    assert list(pair.tokens) == wanted.ids
    assert pair.first_length == wanted.type_ids.index(1)
    assert len(pair.tokens) == input_length(first + second, TWO, cut)


@given(LENGTHS, LENGTHS, st.integers(1, 90), st.sampled_from(["left", "right"]))
def test_a_cut_at_one_end_also_cuts_special_tokens_of_the_input(
    first: int, second: int, max_tokens: int, side: Side
) -> None:
    cut, whole = TextCut(max_tokens, side), library()
    part = slice(-max_tokens, None) if side == "left" else slice(max_tokens)
    one, other = (token_array(3 + i % 20 for i in range(size)) for size in (first, second))
    assert list(one_text(content_of(one, cut), ONE, cut)) == whole.encode(text(one)).ids[part]
    encoding = whole.encode(text(one), text(other))
    pair = two_texts(content_of(one, cut), content_of(other, cut), TWO, cut)
    types = encoding.type_ids[part]
    assert pair is not None
    assert list(pair.tokens) == encoding.ids[part]
    assert pair.first_length == (types.index(1) if 1 in types else len(types))


def test_a_cut_below_the_special_tokens_keeps_the_first_tokens_of_all() -> None:
    """With so few tokens, Hugging Face's tokenizers truncate nothing. vLLM then truncates their
    output.
    """
    cut = TextCut(1)
    assert list(one_text(content_of(FIRST, cut), ONE, cut)) == [1]
    cut = TextCut(2)
    assert list(one_text(content_of(FIRST, cut), ONE, cut)) == [1, 2]
    pair = two_texts(content_of(FIRST, cut), content_of(SECOND, cut), TWO, cut)
    assert pair is not None
    assert (list(pair.tokens), pair.first_length) == ([1, 10], 2)


@pytest.mark.parametrize(
    ("max_tokens", "kept"),
    [(9, [20, 21]), (8, [20]), (7, None), (4, None)],
)
def test_a_limit_on_the_tokens_of_documents_leaves_the_query_whole(
    max_tokens: int, kept: list[int] | None
) -> None:
    cut = TextCut(max_tokens)
    pair = two_texts(content_of(FIRST, cut), content_of(SECOND, cut), TWO, cut, cuts_second=True)
    wanted = None if kept is None else [1, 10, 11, 12, 13, 2, *kept, 2]
    assert (None if pair is None else list(pair.tokens)) == wanted


def test_all_tokens_count_as_the_first_text_if_token_types_do_not_differ() -> None:
    special = SpecialTokens(CLS, SEP, SEP, (0, 0, 0, 0, 0))
    pair = two_texts(content_of(FIRST, None), content_of(SECOND, None), special, None)
    assert pair is not None
    assert pair.first_length == len(pair.tokens) == 9


def test_no_more_tokens_of_a_text_are_kept_than_an_input_may_have() -> None:
    assert content_of(FIRST, TextCut(2)) == Content(FIRST[:2], 4)
    assert content_of(FIRST, TextCut(2, "left")) == Content(FIRST[2:], 4)
    assert content_of(FIRST, None) == Content(FIRST, 4)
