"""The grammar for tool calls accepts exactly the calls that the request's form describes."""

from __future__ import annotations

import json
from typing import Any, Final

import pytest

from pdmesh.core.sampling.tool_call_grammar import NoGrammar, call_grammar

llguidance = pytest.importorskip("llguidance")
TOWN: Final = {
    "type": "object",
    "properties": {"town": {"type": "string"}},
    "required": ["town"],
    "additionalProperties": False,
}


def schema(style: str = "json", **fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": TOWN, "style": style, **fields}


def tag(name: str = "f", content: Any = None) -> dict[str, Any]:
    begin = f'<call>{{"name": "{name}", "arguments": '
    return {"type": "tag", "begin": begin, "content": content or schema(), "end": "}</call>"}


def takes(form: dict[str, Any], text: str) -> bool:
    """Say whether the whole text, byte by byte, is an answer of this form."""
    grammar = call_grammar({"type": "structural_tag", "format": form})
    matcher = llguidance.LLMatcher(_VOCABULARY, grammar, log_level=0)
    assert not matcher.is_error(), (matcher.get_error(), grammar)
    ids = list(text.encode())
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


class Bytes:
    """A tokenizer whose tokens are bytes."""

    def __init__(self) -> None:
        self.eos_token_id, self.bos_token_id, self.unk_token_id = 256, None, None
        self.tokens = [*(bytes([each]) for each in range(256)), b"<eos>"]
        self.special_token_ids = [256]

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


_VOCABULARY: Final = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Bytes()))
CALL: Final = '<call>{"name": "f", "arguments": {"town": "K\u00f6ln"}}</call>'
OTHER: Final = CALL.replace('"f"', '"g"')
WRONG: Final = CALL.replace('"town"', '"city"')
TAGS: Final = {"type": "tags_with_separator", "tags": [tag(), tag("g")], "separator": ""}


@pytest.mark.parametrize(
    ("form", "taken", "refused"),
    [
        (tag(), [CALL], [OTHER, WRONG, "", CALL + CALL, "x" + CALL]),
        ({**TAGS, "at_least_one": True}, [CALL, OTHER, CALL + OTHER], ["", WRONG, "Hello"]),
        ({**TAGS, "at_least_one": True, "stop_after_first": True}, [OTHER], [CALL + OTHER, ""]),
        ({**TAGS, "at_least_one": False}, ["", CALL + CALL], [WRONG]),
        ({**TAGS, "at_least_one": True, "separator": "\n"}, [f"{CALL}\n{CALL}"], [CALL + CALL]),
        (
            {"type": "triggered_tags", "triggers": ["<call>"], "tags": [tag(), tag("g")]},
            ["Hello.", "", CALL, f"I look. {OTHER} So.", CALL + OTHER],
            [WRONG, "<call>x", f"Hm {WRONG}"],
        ),
        (
            {
                "type": "triggered_tags", "triggers": ["<call>"], "tags": [tag()],
                "stop_after_first": True,
            },
            ["Hello.", f"Hm {CALL}"],
            [CALL + CALL, WRONG],
        ),
        (
            {
                "type": "triggered_tags", "triggers": ["<call>"], "tags": [tag()],
                "at_least_one": True,
            },
            [CALL, CALL + CALL],
            ["Hello.", ""],
        ),
        (
            {
                "type": "sequence",
                "elements": [
                    {"type": "const_string", "value": 'a/"\\\n'},
                    {"type": "regex", "pattern": "\\d+/"},
                    {"type": "optional", "content": schema()},
                ],
            },
            ['a/"\\\n12/{"town": "x"}', 'a/"\\\n1/'],
            ['a/"\\\n12{"town": "x"}', 'a/"\\\n/'],
        ),
        (
            {"type": "or", "elements": [tag(), {"type": "const_string", "value": "no"}]},
            [CALL, "no"],
            ["yes"],
        ),
        (tag(content={"type": "json_schema", "json_schema": True}), [CALL, WRONG], [OTHER]),
    ],
)  # fmt: skip
def test_a_form_takes_its_calls_and_nothing_else(
    form: dict[str, Any], taken: list[str], refused: list[str]
) -> None:
    assert [text for text in taken if not takes(form, text)] == []
    assert [text for text in refused if takes(form, text)] == []


@pytest.mark.parametrize(
    "form",
    [
        {"type": "any_tokens"},
        {},
        tag(content=schema("other_xml")),
        tag(content=schema("qwen_xml", json_schema={"type": "array"})),
        schema("qwen_xml"),
        {**tag(), "end": ["a", "b"]},
        {**TAGS, "tags": []},
    ],
)
def test_a_form_without_words_is_refused(form: dict[str, Any]) -> None:
    with pytest.raises(NoGrammar):
        call_grammar({"format": form})
    with pytest.raises(NoGrammar):
        call_grammar({"structures": []})


def test_a_form_that_is_nested_too_deeply_is_refused() -> None:
    form: dict[str, Any] = {"type": "const_string", "value": "x"}
    for _ in range(50):
        form = {"type": "optional", "content": form}
    with pytest.raises(NoGrammar):
        call_grammar({"format": form})


def test_names_and_schemas_of_clients_stay_text() -> None:
    name = '"}\n start: /.*/ \u00e9\u2028'
    form = {**tag(), "begin": name}
    assert takes(form, name + '{"town": "x"}}</call>')
    assert json.dumps(name) in call_grammar({"format": form})
