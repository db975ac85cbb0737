"""Log probabilities in an answer: each token's own bytes and offset, and always the drawn token."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh.services.gateway.http.logprobs import LogprobWriter
from pdmesh.services.gateway.text.tokenizer import ModelFacts, Tokenizer
from pdmesh.v1.common_pb2 import TokenLogprob
from tests.fakes.tokenizers import BYTE_LEVEL, END, PIECES, TOKENIZERS

NAMES = ("llama", "metaspace", "byte level")
TEXT = "the 🚀 über"


def tokenizer(name: str) -> Tokenizer:
    inner = TOKENIZERS[name]
    return Tokenizer(inner, None, ModelFacts(frozenset(), inner.get_vocab_size()))


def drawn(token_id: int, *top: tuple[int, float], logprob: float = -3.0) -> TokenLogprob:
    return TokenLogprob(
        token_id=token_id,
        logprob=logprob,
        top_token_ids=[i for i, _ in top],
        top_logprobs=[value for _, value in top],
    )


def tokens_of(name: str, text: str) -> list[int]:
    """The tokens of the text. There is one per byte, except where the vocabulary has a longer
    piece.
    """
    if name == "byte level":
        return list(BYTE_LEVEL.encode(text).ids)
    return [len(PIECES) + byte for byte in text.encode()]


@pytest.mark.parametrize("name", NAMES)
def test_the_bytes_of_all_tokens_together_are_those_of_the_text(name: str) -> None:
    written = LogprobWriter(tokenizer(name), [1]).chat([drawn(i) for i in tokens_of(name, TEXT)])
    joined = bytes(byte for entry in written["content"] for byte in entry["bytes"])
    assert joined == TEXT.encode()
    assert not any("\ufffd" in entry["token"] for entry in written["content"])
    part = next(e for e in written["content"] if 0xF0 in e["bytes"])
    assert part["token"].startswith("bytes:")
    assert "\\xf0" in part["token"]


@pytest.mark.parametrize("name", ["llama", "metaspace"])
def test_a_piece_keeps_its_space(name: str) -> None:
    the = PIECES.index("▁the")
    written = LogprobWriter(tokenizer(name), [the]).completion([drawn(the), drawn(the)])
    assert written["tokens"] == [" the", " the"]
    assert written["text_offset"] == [0, 4]
    first_of_all = LogprobWriter(tokenizer(name), []).completion([drawn(the), drawn(the)])
    assert first_of_all["text_offset"] == [0, 3], "the decoder takes the first space away"


@pytest.mark.parametrize("num_top", [0, 1, 2, 3])
def test_the_drawn_token_is_always_among_the_logprobs(num_top: int) -> None:
    """If the drawn token is not among the likeliest, there are `logprobs` + 1 entries, as in vLLM
    and OpenAI's API.
    """
    of = tokenizer("byte level")
    ids = tokens_of("byte level", "abcd")
    likeliest = [(i, -0.1 * (at + 1)) for at, i in enumerate(ids[:num_top])]
    last = LogprobWriter(of, ()).completion([drawn(ids[3], *likeliest)])["top_logprobs"][0]
    assert len(last) == num_top + 1
    assert last["d"] == pytest.approx(-3.0)
    if num_top:
        first = LogprobWriter(of, ()).completion([drawn(ids[0], *likeliest, logprob=-0.1)])
        assert len(first["top_logprobs"][0]) == num_top
    chat = LogprobWriter(of, ()).chat([drawn(ids[3], *likeliest)])["content"][0]
    assert [e["token"] for e in chat["top_logprobs"]] == list("abc")[:num_top], (
        "the likeliest token"
    )


def test_tokens_with_parts_of_characters_do_not_hide_each_other() -> None:
    of = tokenizer("llama")
    first, second, third = tokens_of("llama", "€")
    entry = LogprobWriter(of, ()).completion([drawn(first, (second, -4.0), (third, -5.0))])
    assert set(entry["top_logprobs"][0]) == {"bytes:\\xe2", "bytes:\\x82", "bytes:\\xac"}


def test_tokens_are_spelt_as_their_ids_if_that_is_asked_for() -> None:
    writer = LogprobWriter(tokenizer("llama"), (), spells_ids=True)
    entry = writer.completion([drawn(1, (2, -4.0), (3, -5.0))])
    assert entry["tokens"] == ["token_id:1"]
    assert list(entry["top_logprobs"][0]) == ["token_id:1", "token_id:2", "token_id:3"]
    (told,) = writer.chat([drawn(1, (2, -4.0))])["content"]
    assert (told["token"], told["top_logprobs"][0]["token"]) == ("token_id:1", "token_id:2")
    assert bytes(told["bytes"]) == tokenizer("llama").token_bytes(1)


def test_an_impossible_token_has_a_number_in_json() -> None:
    entry = LogprobWriter(tokenizer("llama"), ()).completion(
        [drawn(1, (2, float("-inf")), logprob=float("-inf"))]
    )
    assert entry["token_logprobs"] == [-9999.0]
    assert set(entry["top_logprobs"][0].values()) == {-9999.0}


@pytest.mark.parametrize("name", NAMES)
def test_offsets_are_the_positions_of_tokens_in_the_text_for_any_streaming(name: str) -> None:
    of = tokenizer(name)

    @given(
        texts=st.lists(st.sampled_from(["the", " ", "é", "🚀", "日本", "a", "end"]), max_size=8),
        sizes=st.lists(st.integers(0, 4), max_size=20),
        has_prompt=st.booleans(),
    )
    def check(texts: list[str], sizes: Sequence[int], has_prompt: bool) -> None:
        ids: list[int] = []
        for text in texts:
            is_end = text == "end" and name != "byte level"
            ids += [END] if is_end else tokens_of(name, text)
        prompt = [tokens_of(name, ".")[0]] if has_prompt else []
        shown = ""
        stream = of.text_stream(prompt)
        expected = []
        for token_id in ids:
            expected.append(len(shown))
            shown += stream.feed([token_id])
        writer, offsets, rest = LogprobWriter(of, prompt), [], [drawn(i) for i in ids]
        for size in (*sizes, len(rest)):
            offsets += writer.completion(rest[:size])["text_offset"]
            rest = rest[size:]
        assert offsets == expected

    check()
