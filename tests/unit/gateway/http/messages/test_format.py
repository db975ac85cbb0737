"""The stop reasons of a message, and tool arguments that are not an object."""

from __future__ import annotations

from typing import Any

import pytest

from pdmesh.services.gateway.http.messages.format import _input_of, _stop_of
from pdmesh.services.gateway.text.choice_text import EndReason, TextDelta


@pytest.mark.parametrize(
    ("reason", "stop", "arguments", "expected"),
    [
        ("stop", None, None, ("end_turn", None)),
        ("stop", 7, None, ("end_turn", None)),
        ("stop", "END", None, ("stop_sequence", "END")),
        ("length", None, None, ("max_tokens", None)),
        ("length", None, "{}", ("max_tokens", None)),
        ("tool_calls", None, "{}", ("tool_use", None)),
        ("stop", None, "{}", ("tool_use", None)),
        ("tool_calls", "END", '{"a": 1}', ("tool_use", None)),
        ("tool_calls", "END", '{"a": ', ("stop_sequence", "END")),
    ],
)
def test_a_message_says_why_it_ended(
    reason: EndReason,
    stop: int | str | None,
    arguments: str | None,
    expected: tuple[str, str | None],
) -> None:
    delta = TextDelta(0, "", (), (), True, reason, stop_reason=stop)
    found = _stop_of(delta, arguments)
    assert (found["stop_reason"], found["stop_sequence"]) == expected


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"a": [1]}', {"a": [1]}),
        ("", {}),
        ("[1]", {"arguments": "[1]"}),
        ('{"a": ', {"arguments": '{"a": '}),
        ("[" * 100_000, {"arguments": "[" * 100_000}),
    ],
)
def test_arguments_that_are_not_an_object_are_shown_unchanged(
    arguments: str, expected: dict[str, Any]
) -> None:
    assert _input_of(arguments) == expected
