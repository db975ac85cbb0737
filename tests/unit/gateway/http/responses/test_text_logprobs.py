"""A response's text has the log probabilities of its own tokens, however the tokens come."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest

from pdmesh.services.gateway.http.responses.text_logprobs import TextLogprobs

# A recorded answer: each token, and the text that its parser gave with it.
RAIN = "\U0001f327".encode()
RECORDED: list[tuple[bytes, str]] = [
    (b"<think>", ""),
    (b"It", ""),
    (b" is", ""),
    (b" the", ""),
    (b"</think>", ""),
    (b"\n\n", ""),
    (b"It", "It"),
    (b" is", " is"),
    (b" ", " "),
    (RAIN[:2], ""),
    (RAIN[2:], "\U0001f327"),
    (b" <", ""),  # could have begun a call
    (b"3", " <3"),
    (b"</s>", ""),
]
OF_TEXT = range(6, 13)


def entry(index: int) -> dict[str, Any]:
    return {"logprob": -index / 8, "bytes": list(RECORDED[index][0])}


def found(cuts: tuple[int, ...]) -> list[dict[str, Any]]:
    """What is found if the tokens come in pieces that end at the `cuts`."""
    text_logprobs, told = TextLogprobs(), []
    begin = 0
    for end in (*cuts, len(RECORDED)):
        text = "".join(text for _, text in RECORDED[begin:end])
        told += text_logprobs.of(text, [entry(i) for i in range(begin, end)])
        begin = end
    return told


@pytest.mark.parametrize("num_cuts", [0, 1, 2, len(RECORDED) - 1])
def test_reasoning_and_marks_are_left_out(num_cuts: int) -> None:
    """The reasoning has the same words as the text."""
    for cuts in combinations(range(1, len(RECORDED)), num_cuts):
        assert found(cuts) == [entry(i) for i in OF_TEXT], cuts


def test_a_call_after_the_text_is_left_out() -> None:
    tokens = [b"Look", b".", b"<tool_call>", b"{}", b"</tool_call>"]
    entries: list[dict[str, Any]] = [{"bytes": list(token)} for token in tokens]
    assert TextLogprobs().of("Look.", entries) == entries[:2]


def test_text_that_no_tokens_spell_gets_the_last_ones_of_its_length() -> None:
    """A replacement character, for example."""
    entries: list[dict[str, Any]] = [
        {"bytes": list(t)} for t in (b"hm", b"</think>", b"a", b"\xff")
    ]
    assert TextLogprobs().of("a\ufffd", entries)[-1] == entries[-1]
    assert TextLogprobs().of("x", []) == []


def test_long_reasoning_is_not_kept() -> None:
    text_logprobs = TextLogprobs()
    for _ in range(50):
        assert text_logprobs.of("", [{"bytes": [97]}] * 100) == []
    assert len(text_logprobs._held) <= 100
