"""A stream of tokens becomes text that continues the prompt's text.

Each piece has whole characters, and nothing is lost at the end.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.decoders import DecodeStream

from pdmesh.services.gateway.text.text_stream import Detokenizer, TextRules, TextStream
from tests.fakes.tokenizers import BYTE_LEVEL, END, PIECES, TOKENIZERS

CHARACTERS = ("é", "€", "日", "🚀", "a", " ")
NAMES = sorted(TOKENIZERS)


def ids(text: str) -> list[int]:
    return list(BYTE_LEVEL.encode(text).ids)


def stream_after(name: str, prompt: Sequence[int], stops: tuple[str, ...] = ()) -> TextStream:
    return TextStream(Detokenizer(TOKENIZERS[name]), prompt, TextRules(stops))


def streamed(name: str, prompt: Sequence[int], tokens: Sequence[int], sizes: Sequence[int]) -> str:
    """The text after the tokens were fed in pieces of these sizes, and the rest at once."""
    stream, shown, rest = stream_after(name, prompt), "", list(tokens)
    for size in sizes:
        shown, rest = shown + stream.feed(rest[:size]), rest[size:]
    return shown + stream.feed(rest) + stream.finish()


def units(name: str) -> st.SearchStrategy[list[list[int]]]:
    """Lists of tokens that belong together: a piece, the bytes of a character, or a special
    token.
    """
    size = TOKENIZERS[name].get_vocab_size()
    if name == "byte level":
        whole = [ids(text) for text in (*CHARACTERS, "the", " word", "\n", "o über")]
    else:
        whole = [[i] for i in range(len(PIECES))] + [[size - 2], [size - 1]]
        if name != "wordpiece":
            whole += [[len(PIECES) + byte for byte in c.encode()] for c in CHARACTERS]
    return st.lists(st.sampled_from(whole), max_size=12)


def flat(lists: list[list[int]]) -> list[int]:
    return [i for part in lists for i in part]


@pytest.mark.fault("F32")
@pytest.mark.parametrize("name", NAMES)
def test_a_stream_adds_what_the_answer_adds_to_the_text_of_the_prompt(name: str) -> None:
    tokenizer = TOKENIZERS[name]

    @given(before=units(name), after=units(name), sizes=st.lists(st.integers(0, 5), max_size=40))
    def check(before: list[list[int]], after: list[list[int]], sizes: list[int]) -> None:
        prompt, tokens = flat(before), flat(after)
        base, whole = tokenizer.decode(prompt), tokenizer.decode(prompt + tokens)
        if whole.startswith(base):  # a decoder may also change the text before the answer
            assert streamed(name, prompt, tokens, sizes) == whole[len(base) :]

    check()


@pytest.mark.parametrize("name", NAMES)
def test_a_stream_gives_the_text_of_plain_vllm(name: str) -> None:
    """The reference is `DecodeStream` of the tokenizers library, which vLLM uses. It starts with
    the prompt's tokens.
    """
    tokenizer = TOKENIZERS[name]

    @given(before=units(name), after=units(name))
    def check(before: list[list[int]], after: list[list[int]]) -> None:
        prompt, tokens = flat(before), flat(after)
        theirs = DecodeStream(ids=list(prompt), skip_special_tokens=True)
        expected = "".join(theirs.step(tokenizer, token_id) or "" for token_id in tokens)
        assert streamed(name, prompt, tokens, [1] * len(tokens)) == expected

    check()


@pytest.mark.fault("F32")
@pytest.mark.parametrize("name", NAMES)
def test_any_tokens_in_any_pieces_give_one_text(name: str) -> None:
    """The tokens include broken bytes, which a model may draw."""
    any_ids = st.lists(st.integers(0, TOKENIZERS[name].get_vocab_size() - 1), max_size=30)
    ids_of = any_ids if name == "byte level" else any_ids | broken_bytes()

    @given(prompt=ids_of, tokens=ids_of, sizes=st.lists(st.integers(0, 7), max_size=20))
    def check(prompt: list[int], tokens: list[int], sizes: list[int]) -> None:
        one_by_one = streamed(name, prompt, tokens, [1] * len(tokens))
        assert streamed(name, prompt, tokens, sizes) == one_by_one
        assert streamed(name, prompt, tokens, ()) == one_by_one

    check()


def broken_bytes() -> st.SearchStrategy[list[int]]:
    some = [len(PIECES) + byte for byte in (0x61, 0xC3, 0xA9, 0xE2, 0x82, 0xAC, 0xF0, 0x9F)]
    return st.lists(st.sampled_from([*some, 0, 1, 3]), max_size=30)


@pytest.mark.parametrize("name", ["llama", "metaspace"])
def test_a_space_stays_after_a_prompt_and_after_broken_bytes(name: str) -> None:
    the, b = PIECES.index("▁the"), PIECES.index("b")
    half = len(PIECES) + 0xE2
    first, second = (len(PIECES) + byte for byte in "é".encode())
    assert stream_after(name, [the]).feed([the]) == " the"
    assert stream_after(name, []).feed([the, the]) == "the the"
    assert stream_after(name, [b, *[END] * 50]).feed([the]) == " the"
    shown = streamed(name, [the], [b, first, second, half, the], [1] * 5)
    assert shown.startswith("bé")
    assert shown.endswith(" the")


@pytest.mark.parametrize("name", ["llama", "metaspace", "byte level"])
def test_an_answer_may_complete_the_last_character_of_the_prompt(name: str) -> None:
    encode: Callable[[str], list[int]] = ids
    if name != "byte level":
        encode = lambda text: [len(PIECES) + byte for byte in text.encode()]  # noqa: E731
    rocket = encode("🚀")
    plain = ids("a") if name == "byte level" else [PIECES.index(",")]
    for cut in range(1, len(rocket)):
        prompt = [*plain, *rocket[:cut]]
        text = TOKENIZERS[name].decode(plain)
        assert stream_after(name, prompt).feed([*rocket[cut:], *plain]) == "🚀" + text
        assert stream_after(name, prompt).feed(plain) == text, (
            "the broken character is in the prompt"
        )


def test_tokens_without_text_are_not_decoded_again_with_each_further_token() -> None:
    """An answer that ignores EOS may consist of EOS tokens alone."""
    tokenizer = TOKENIZERS["llama"]
    lengths: list[int] = []

    class Counting(Detokenizer):
        def decode(self, ids: list[int]) -> str:
            lengths.append(len(ids))
            return super().decode(ids)

    for token in (END, len(PIECES) + 0x82):
        stream = TextStream(Counting(tokenizer), [1], TextRules(("stop",)))
        for _ in range(1000):
            stream.feed([token])
        assert max(lengths, default=0) <= 80


@pytest.mark.fault("F32")
@pytest.mark.parametrize("seed", range(20))
def test_any_chunking_gives_the_same_text_and_never_half_a_character(seed: int) -> None:
    rng = random.Random(seed)
    text = "señor über 日本 🚀 done, ж"
    stream, rest, shown = stream_after("byte level", ()), ids(text), ""
    while rest:
        n = rng.randrange(1, 5)
        part = stream.feed(rest[:n])
        assert "\ufffd" not in part
        shown, rest = shown + part, rest[n:]
    assert shown + stream.finish() == text


@pytest.mark.parametrize("stops", [(), ("never there",)])
def test_whole_characters_before_an_incomplete_one_are_shown_at_the_end(
    stops: tuple[str, ...],
) -> None:
    """max_tokens cuts the answer in the middle of a character. The token with the first half also
    has whole characters.
    """
    size = BYTE_LEVEL.get_vocab_size()
    half = next(i for i in range(size) if BYTE_LEVEL.decode([i]) == " caf\ufffd")
    stream = stream_after("byte level", (), stops)
    shown = "".join(stream.feed([i]) for i in [*ids("the"), half])
    assert shown + stream.finish() == "the caf"
