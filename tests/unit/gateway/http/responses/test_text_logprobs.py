"""A response's text has the log probabilities of its own tokens, in whichever pieces they come."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest

from pdmesh.services.gateway.http.responses.text_logprobs import TextLogprobs
from pdmesh.services.gateway.text.choice_text import TextDelta, ToolCallDelta

# A recorded answer. Each token comes with the text that the parser emitted after it.
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
    (b" <", ""),  # the parser waits, because a tool call could begin like this
    (b"3", " <3"),
    (b"</s>", ""),
]
OF_TEXT = range(6, 13)


def entry(index: int) -> dict[str, Any]:
    return {"logprob": -index / 8, "bytes": list(RECORDED[index][0])}


def delta(text: str, reasoning: str = "", *, has_calls: bool = False) -> TextDelta:
    calls = [ToolCallDelta(0, "{}")] if has_calls else []
    return TextDelta(0, text, (), (), reasoning=reasoning, calls=calls)


def entries_of(*tokens: bytes) -> list[dict[str, Any]]:
    return [{"bytes": list(token), "logprob": -i / 8} for i, token in enumerate(tokens)]


def found(cuts: tuple[int, ...]) -> list[dict[str, Any]]:
    """The log probabilities that are found if the tokens come in pieces that end at the `cuts`."""
    text_logprobs, told = TextLogprobs(), []
    begin = 0
    for end in (*cuts, len(RECORDED)):
        text = "".join(text for _, text in RECORDED[begin:end])
        told += text_logprobs.of(delta(text), [entry(i) for i in range(begin, end)])
        begin = end
    return told


@pytest.mark.parametrize("num_cuts", [0, 1, 2, len(RECORDED) - 1])
def test_reasoning_and_marks_are_left_out(num_cuts: int) -> None:
    """The reasoning contains the same words as the text."""
    for cuts in combinations(range(1, len(RECORDED)), num_cuts):
        assert found(cuts) == [entry(i) for i in OF_TEXT], cuts


def test_a_call_after_the_text_is_left_out() -> None:
    entries = entries_of(b"Look", b".", b"<tool_call>", b'{"q": "', b"Look", b".", b'"}')
    assert TextLogprobs().of(delta("Look.", has_calls=True), entries) == entries[:2]


def test_of_reasoning_text_and_a_call_that_say_the_same_the_text_is_found() -> None:
    said = (b"It", b" is")
    entries = entries_of(b"<think>", *said, b"</think>", *said, b"<call>", *said, b"</call>")
    told = TextLogprobs().of(delta("It is", "It is", has_calls=True), entries)
    assert told == entries[4:6]


def test_a_part_of_a_mark_is_not_the_text() -> None:
    entries = entries_of(b"</think>", b"think", b"<call>", b"think", b"</call>")
    assert TextLogprobs().of(delta("think", has_calls=True), entries) == entries[1:2]


def test_text_that_no_tokens_spell_gets_the_last_ones_of_its_length() -> None:
    """A replacement character is such a text."""
    entries = entries_of(b"hm", b"</think>", b"a", b"\xff")
    assert TextLogprobs().of(delta("a\ufffd"), entries)[-1] == entries[-1]
    assert TextLogprobs().of(delta("x"), []) == []


def test_long_reasoning_is_not_kept() -> None:
    text_logprobs = TextLogprobs()
    for _ in range(50):
        assert text_logprobs.of(delta(""), [{"bytes": [97]}] * 100) == []
    assert len(text_logprobs._held) <= 100
