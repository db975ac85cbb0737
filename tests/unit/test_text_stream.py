"""Text from tokens as they come: whole characters only, and nothing lost at the end."""

from __future__ import annotations

import random

import pytest

from pdmesh.engine.sim_tokenizer import build_tokenizer
from services.gateway.tokenizer import TextStream

TOKENIZER = build_tokenizer()


def ids(text: str) -> list[int]:
    return list(TOKENIZER.encode(text).ids)


@pytest.mark.fault("F32")
@pytest.mark.parametrize("seed", range(20))
def test_any_chunking_gives_the_same_text_and_never_half_a_character(seed: int) -> None:
    rng = random.Random(seed)
    text = "señor über 日本 🚀 done, ж"
    stream, rest, shown = TextStream(TOKENIZER, ()), ids(text), ""
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
    """A stream cut by max_tokens in the middle of a character, whose first half came with a space."""
    size = TOKENIZER.get_vocab_size()
    half = next(i for i in range(size) if TOKENIZER.decode([i]) == " caf\ufffd")
    stream = TextStream(TOKENIZER, stops)
    shown = "".join(stream.feed([i]) for i in [*ids("the"), half])
    assert shown + stream.finish() == "the caf"
