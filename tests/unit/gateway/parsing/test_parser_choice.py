"""The parsers for a model's answers are chosen by the chat template."""

from __future__ import annotations

import pytest

from pdmesh.services.gateway.parsing.parser_choice import AUTO, NONE, ParserNames, parser_names
from pdmesh.services.gateway.text.tokenizer import AnswerMarks

# Lines of real templates that show a tool call and the end of the reasoning.
HERMES = '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
QWEN3 = HERMES + "{%- if '</think>' in content %}"
CODER = "<tool_call>\n<function=example_function_name>\n<parameter=example>"
GLM = "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>"
LLAMA = '{"name": function name, "parameters": dictionary of argument name}<|eot_id|>'
MISTRAL = '{{- "[TOOL_CALLS][" }}'
DEEPSEEK_V3 = (
    "<\uff5ctool\u2581calls\u2581begin\uff5c>function<\uff5ctool\u2581sep\uff5c>\n```json\n"
)
DEEPSEEK_V31 = "<\uff5ctool\u2581calls\u2581begin\uff5c>{% if thinking %}<think>{% else %}</think>"
R1 = "{{'<\uff5cAssistant\uff5c><think>\\n'}}{% if '</think>' in content %}"


@pytest.mark.parametrize(
    ("template", "model_type", "expected"),
    [
        ("{{ messages }}", "llama", ParserNames()),
        ("", "", ParserNames()),
        (HERMES, "qwen2", ParserNames("hermes")),
        (QWEN3, "qwen3", ParserNames("hermes", "qwen3")),
        (QWEN3, "qwen3_moe", ParserNames("hermes", "qwen3")),
        (CODER, "qwen3_moe", ParserNames("qwen3_coder")),
        (GLM + "</think>", "glm4_moe", ParserNames("glm45", "glm45")),
        (LLAMA, "llama", ParserNames("llama3_json")),
        (LLAMA, "smollm", ParserNames()),
        (MISTRAL, "mistral", ParserNames("mistral")),
        (DEEPSEEK_V3, "deepseek_v3", ParserNames("deepseek_v3")),
        (DEEPSEEK_V31, "deepseek_v3", ParserNames("deepseek_v31", "deepseek_v3")),
        (R1, "qwen2", ParserNames("", "deepseek_r1")),
    ],
)
def test_a_chat_template_determines_the_parsers(
    template: str, model_type: str, expected: ParserNames
) -> None:
    assert parser_names(AnswerMarks(model_type, template), AUTO, AUTO) == expected


def test_a_setting_wins_over_the_template() -> None:
    marks = AnswerMarks("qwen3", QWEN3)
    assert parser_names(marks, NONE, "deepseek_r1") == ParserNames("", "deepseek_r1")
    assert parser_names(marks, "xlam", NONE) == ParserNames("xlam", "")


def test_every_default_is_a_name_that_vllm_knows() -> None:
    """The names are read from the files of vLLM, because importing vLLM takes long."""
    import importlib.util
    from pathlib import Path

    from pdmesh.services.gateway.parsing import parser_choice

    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        pytest.skip("vLLM is not installed")
    room = Path(found.origin).parent
    for folder, table in (
        ("tool_parsers", parser_choice._TOOL_PARSERS),
        ("reasoning", parser_choice._REASONING_PARSERS),
    ):
        text = (room / folder / "__init__.py").read_text()
        assert [name for _, _, name in table if f'"{name}": (' not in text] == []
