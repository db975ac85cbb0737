"""The grammar of XML arguments accepts the values that fit the schema.

A schema that the grammar cannot express is refused.
"""

from __future__ import annotations

from typing import Any, Final

import pytest

from pdmesh.core.sampling.lark import LarkRules
from pdmesh.core.sampling.tool_call_xml import STYLES, NoXmlGrammar, xml_arguments

llguidance = pytest.importorskip("llguidance")
_DSML: Final = "\uff5cDSML\uff5c"
_BYTES: Final = llguidance.LLTokenizer("byte")


def takes(schema: Any, style: str, text: str, end: str = "E") -> bool:
    rules = LarkRules()
    start = xml_arguments(schema, style, end, rules)
    grammar = "\n".join(["%llguidance {}", f"start: {start}", *rules.lines, ""])
    matcher = llguidance.LLMatcher(_BYTES, grammar, log_level=0)
    assert not matcher.is_error(), (matcher.get_error(), grammar)
    data = list(text.encode())
    return bool(matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting())


def given(*required: str, **properties: Any) -> dict[str, Any]:
    definitions = {"Unit": {"enum": ["c", "f"]}, "N": {"type": "integer"}}
    return {
        "type": "object", "properties": properties, "required": list(required),
        "$defs": definitions,
    }  # fmt: skip


def one(value: Any, text: str) -> bool:
    """Say whether a required parameter with this schema accepts the text."""
    return takes(given("k", k=value), "minimax_xml", f'<parameter name="k">{text}</parameter>\nE')


TOWN: Final = given("town", town={"type": "string"}, n={"type": "integer"})
WRITTEN: Final = {
    "qwen_xml": "<parameter=town>K\u00f6ln</parameter><parameter=n>1</parameter>E",
    "minimax_xml": '<parameter name="town">K\u00f6ln</parameter>\n'
    '<parameter name="n">1</parameter>\nE',
    "deepseek_xml": f'<{_DSML}parameter name="town" string="true">K\u00f6ln</{_DSML}parameter>\n'
    f'<{_DSML}parameter name="n" string="false">1</{_DSML}parameter>\nE',
    "deepseek_v4_1_xml": f'<{_DSML} parameter name="town" string="true">K\u00f6ln'
    f'</{_DSML} parameter>\n<{_DSML} parameter name="n" string="false">1</{_DSML} parameter>\nE',
    "glm_xml": "<arg_key>town</arg_key><arg_value>K\u00f6ln</arg_value>\n"
    "<arg_key>n</arg_key>\n<arg_value>1</arg_value>E",
}


@pytest.mark.parametrize("style", sorted(STYLES))
def test_each_style_writes_its_arguments_in_order(style: str) -> None:
    text = WRITTEN[style]
    assert takes(TOWN, style, text)
    assert not takes(TOWN, style, text.replace("town", "city"))
    assert not takes(TOWN, style, text.replace("1<", "x<"))
    assert not takes(TOWN, style, "E"), "a required parameter is missing"
    assert takes({**TOWN, "required": []}, style, "E")
    assert not takes(TOWN, style, text.replace("E", text)), "each parameter may appear once"
    assert takes(True, style, text.replace("town", "anything").replace("false", "true"))
    assert takes(True, style, "E")


def test_the_qwen_style_puts_each_mark_on_its_own_line() -> None:
    end = "\n</function>"
    text = (
        "<parameter=town>\nK\u00f6ln\n\n</parameter>\n<parameter=n>\n1\n</parameter>\n</function>"
    )
    assert takes(TOWN, "qwen_xml", text, end)
    assert not takes(TOWN, "qwen_xml", text.replace("\n", ""), end)


@pytest.mark.parametrize(
    ("schema", "taken", "refused"),
    [
        ({"type": "string"}, ["", "a\nb", "1 < 2", "<b>", "</p>"],
         ["</invoke>", "< / parameter >", '<parameter name="x">']),
        ({"type": "string", "minLength": 1, "maxLength": 2}, ["a", "\u00f6\u4e2d"], ["", "abc"]),
        ({"type": "string", "pattern": "^a/[0-9]+$"}, ["a/12"], ["a/", "xa/1", "a/1x"]),
        ({"type": "string", "pattern": "b+"}, ["b", "abba"], ["a", ""]),
        ({"type": "string", "format": "date"}, ["2026-02-28"], ["2026-02-31", "today"]),
        ({"type": "string", "format": "unknown"}, ["x"], []),
        ({"type": "string", "enum": ["c", "cc", ""]}, ["c", "cc", ""], ["f", "ccc"]),
        ({"const": "x"}, ["x"], ["y"]),
        ({"$ref": "#/$defs/Unit"}, ["c"], ["x"]),
        ({"type": ["string", "null"], "maxLength": 1}, ["a", "null", ""], ["ab"]),
        ({"anyOf": [{"$ref": "#/$defs/Unit"}, {"type": "null"}]}, ["f", "null"], ["x"]),
        ({"type": ["string", "integer"]}, ["x", "1"], []),
        (True, ["x", "1"], []),
        ({"type": "integer", "minimum": 3, "maximum": 12}, ["3", "12"], ["2", "x", ""]),
        ({"type": "number"}, ["1", "-2.5e3"], ["1e999", "01", "x"]),
        ({"enum": [1, 10]}, ["1", "10"], ["2", "100"]),
        ({"type": "array", "items": {"$ref": "#/$defs/N"}}, ["[1, 2]", "[]"], ['["a"]', "1"]),
    ],
)  # fmt: skip
def test_a_value_keeps_to_its_schema(schema: Any, taken: list[str], refused: list[str]) -> None:
    assert [text for text in taken if not one(schema, text)] == []
    assert [text for text in refused if one(schema, text)] == []


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array"},
        {"anyOf": [{"type": "object"}]},
        given("k"),
        {"properties": [1]},
        {"additionalProperties": {"type": "integer"}},
        given(**{"a b": {"type": "string"}}),
        given(**{"a>": {"type": "string"}}),
        given(k=False),
        given(k={"$ref": "#/$defs/N"}),
        given(k={"$ref": "#/$defs/None"}),
        given(k={"$ref": "elsewhere"}),
        given(k={"type": ["string", "integer"], "maxLength": 3}),
        given(k={"type": ["string", "null"], "enum": ["null", None]}),
        given(k={"type": "string", "not": {}}),
        given(k={"type": "string", "enum": ["</arg_value>"]}),
        given(k={"type": "string", "enum": ["a"], "maxLength": 1}),
        given(k={"type": "string", "minLength": "1}/"}),
        given(k={"type": "string", "minLength": -1}),
        given(k={"type": "string", "pattern": 1}),
        given(k={"type": "string", "pattern": "a^b"}),
        given(k={"type": "string", "pattern": "^a|b$"}),
        given(**{f"k{n}": {} for n in range(257)}),
    ],
)
def test_a_schema_that_the_grammar_cannot_express_is_refused(schema: Any) -> None:
    with pytest.raises(NoXmlGrammar):
        xml_arguments(schema, "glm_xml", "E", LarkRules())


def test_a_parser_that_looks_into_objects_takes_no_references_there() -> None:
    schema = given(k={"type": "array", "items": {"$ref": "#/$defs/N"}})
    assert xml_arguments(schema, "glm_xml", "E", LarkRules())
    with pytest.raises(NoXmlGrammar):
        xml_arguments(schema, "deepseek_xml", "E", LarkRules())
