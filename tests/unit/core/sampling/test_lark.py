"""Texts, tokens and regular expressions are written as Lark grammar."""

from __future__ import annotations

import pytest

from pdmesh.core.sampling.lark import LarkRules, quoted, regex


def test_a_text_that_is_one_token_is_written_as_that_token() -> None:
    rules = LarkRules({"<call>": 7, "</call>": 8, "<ca": 9})
    assert rules.literal("a<call>f</call>") == '"a" <[7]> "f" <[8]>'
    assert rules.literal("<cab") == '<[9]> "b"'
    assert (rules.literal(""), LarkRules().literal("<call>")) == ("", '"<call>"')
    assert (rules.first_token("<call>x"), rules.first_token("x<call>")) == ("<call>", "")
    assert LarkRules().first_token("<call>") == ""


def test_a_text_ends_at_its_first_end_mark_whether_that_is_a_token_or_text() -> None:
    rules = LarkRules({"<call>": 7})
    text = rules.terminal("/.*/")
    assert [rules.until(text, end) for end in ("<call>x", "x<call>")] == ["r1", "r2"]
    assert rules.lines == ["T0: /.*/", 'r1: T0 <[7]> "x"', 'r2[lazy]: T0 "x<call>"']


@pytest.mark.parametrize(
    ("text", "expected"),
    [("", ""), ('a"\n', '"a\\"\\n"'), ("\u2028", '"\\u2028"'), ("\U0001f327", '"\U0001f327"')],
)
def test_texts_are_quoted(text: str, expected: str) -> None:
    assert quoted(text) == expected


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [("a/b", r"/a\/b/"), (r"a\/b", r"/a\/b/"), (r"a\\/b", r"/a\\\/b/"), ("a\nb", r"/a\nb/")],
)
def test_a_pattern_stays_between_its_slashes(pattern: str, expected: str) -> None:
    assert regex(pattern) == expected
