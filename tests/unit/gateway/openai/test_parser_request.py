"""The parsers of answers get only the part of a chat that they read.

If the gateway cannot enforce a form of the answer, the error names the field that asks for the
form.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pdmesh.engine.grammars.asked_grammars import GrammarKind, grammar_of
from pdmesh.engine.grammars.compiler import GrammarRefused
from pdmesh.errors import InvalidRequest
from pdmesh.services.gateway.openai.calls import MAX_VARIABLES, template_variables
from pdmesh.services.gateway.openai.parser_request import asked_calls, parser_request, parsing_of
from pdmesh.services.gateway.openai.schema import ChatCompletionRequest, parse_chat
from pdmesh.services.gateway.parsing.answer_parsing import AnswerParsers
from pdmesh.services.gateway.parsing.frames import PreparedAnswer
from pdmesh.services.gateway.parsing.parser_choice import ParserNames
from pdmesh.services.gateway.request.spec import ServedModel

TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f"}}


def chat(*messages: dict[str, Any], **fields: Any) -> ChatCompletionRequest:
    given = [{"role": "user", "content": "secret " * 1000}, *messages]
    return parse_chat(json.dumps({"model": "m", "messages": given, **fields}).encode())


def tag(style: str) -> str:
    content = {"type": "json_schema", "json_schema": {}, "style": style}
    form = {"type": "tag", "begin": "<f>", "content": content, "end": "</f>"}
    return json.dumps({"structural_tag": json.dumps({"format": form})})


def test_parsers_learn_only_the_number_of_calls_in_each_message() -> None:
    call = {"id": "1", "function": {"name": "f", "arguments": "{}"}}
    asked = {"role": "assistant", "content": "secret", "tool_calls": [call, call]}
    body = parser_request(chat(asked, tools=[TOOL]))
    assert b"secret" not in body
    read = json.loads(body)
    assert [len(m.get("tool_calls", ())) for m in read["messages"]] == [0, 2]
    assert (read["tool_choice"], read["include_reasoning"]) == ("auto", True)
    assert json.loads(parser_request(chat()))["tool_choice"] == "none"


def test_parsers_get_shortened_template_variables() -> None:
    given = {"enable_thinking": [], "deep": {"a": 1}, "on": True, "mode": "x" * 9000, "n" * 90: 1}
    read = json.loads(parser_request(chat(chat_template_kwargs=given)))["chat_template_kwargs"]
    assert read == {"enable_thinking": False, "deep": True, "on": True, "mode": "x" * 64}


def test_a_choice_of_tools_means_nothing_without_tools() -> None:
    assert json.loads(parser_request(chat(tool_choice="auto")))["tool_choice"] == "none"


def test_the_number_of_template_variables_is_bounded() -> None:
    with pytest.raises(InvalidRequest) as caught:
        template_variables({f"k{n}": n for n in range(MAX_VARIABLES + 1)})
    assert caught.value.field == "chat_template_kwargs"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"function": {"name": "f"}}}, "tool_choice"),
        ({"tools": [TOOL], "parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"tools": [TOOL, {"function": {"name": "g", "strict": True}}]},
            "tools[1].function.strict"),
    ],
)  # fmt: skip
def test_the_refusal_of_a_call_format_names_the_field_that_asks_for_it(
    fields: dict[str, Any], field: str
) -> None:
    asked = asked_calls(tag("json"), chat(**fields))
    assert (asked.kind, asked.field) == (GrammarKind.CALLS, field)
    with pytest.raises(GrammarRefused, match="no grammar for arguments in other_xml"):
        grammar_of(asked_calls(tag("other_xml"), chat(**fields)))


def test_a_schema_of_calls_stays_a_schema() -> None:
    schema = {"type": "array", "minItems": 1}
    asked = asked_calls(json.dumps({"json": schema}), chat(tools=[TOOL], tool_choice="required"))
    assert (asked.kind, json.loads(asked.text)) == (GrammarKind.JSON, schema)


class EndlessReasoning:
    """The parsers of a model whose reasoning is not ended by a single token.

    `constraint` is the form of the model's tool calls.
    """

    is_installed = True

    def __init__(self, constraint: str = "") -> None:
        self._reply = PreparedAnswer(False, constraint, [], lacks_end=True)

    def model(self, tokenizer: object) -> Any:
        return SimpleNamespace(names=ParserNames("hermes", "granite"))

    async def prepared(self, *asked: object) -> PreparedAnswer:
        return self._reply


async def test_if_no_token_ends_the_reasoning_only_requests_with_a_form_are_refused() -> None:
    model = ServedModel("m", cast(Any, None), 10)

    async def parsed(parsers: EndlessReasoning, form_field: str = "", **fields: Any) -> object:
        request = chat(tools=[TOOL], **fields)
        return await parsing_of(request, model, cast(AnswerParsers, parsers), b"p", form_field)

    assert await parsed(EndlessReasoning()) is not None
    forced = {"tool_choice": "required"}
    cases: list[tuple[Any, str, dict[str, Any], str]] = [
        (EndlessReasoning(), "response_format", {}, "response_format"),
        (EndlessReasoning(tag("json")), "", forced, "tool_choice"),
    ]
    for parsers, form_field, fields, expected in cases:
        with pytest.raises(InvalidRequest) as caught:
            await parsed(parsers, form_field, **fields)
        assert (caught.value.field, caught.value.reason) == (expected, "UNSUPPORTED_FIELD")
        assert expected in caught.value.message
