"""Tests a gateway that cannot parse tool calls or reasoning. Either vLLM is missing, or the model's
tokenizer lacks the special tokens.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from pdmesh.services.gateway.parsing.answer_parsing import AnswerParsers
from pdmesh.services.gateway.parsing.parser_process import ParserProcess
from tests.fakes.gateway_mesh import GatewayMesh, gateway_mesh
from tests.fakes.tiny_model import EOS

TEMPLATE = """<tool_call>{"name": "x", "arguments": {}}</tool_call>{{ tools | tojson }}
{%- for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}</think>"""
USER: list[Any] = [{"role": "user", "content": "hi"}]
TOOLS: list[Any] = [{"type": "function", "function": {"name": "weather"}}]
WRITTEN = "<think>hm</think>Fine."
UNFIT = (sys.executable, "-m", "tests.fakes.parser_child", "--unfit")
CASES: dict[str, Any] = {
    "no vLLM": {"needs": "no_such_package"},
    "a tokenizer without the marks": {"command": UNFIT, "needs": "sys"},
}


@pytest.fixture(params=CASES)
async def mesh(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[GatewayMesh]:
    directory = tmp_path_factory.mktemp("parsers")
    async with gateway_mesh(
        directory, template=TEMPLATE, model_type="qwen3", reasoning_parser="none"
    ) as mesh:
        process = ParserProcess(**CASES[request.param])
        mesh.gateway.frontend.shared.parsers = AnswerParsers("auto", "auto", process)
        script = [*mesh.tokenizer._encode(WRITTEN, add_special_tokens=False), EOS]
        for instance in mesh.instances.values():
            instance.script = script
        yield mesh


async def test_tools_are_refused_and_reasoning_stays_in_the_text(
    mesh: GatewayMesh, client: openai.AsyncOpenAI
) -> None:
    for _ in range(2):
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="tiny", messages=USER, tools=TOOLS)
        assert (caught.value.param, caught.value.code) == ("tools", "unsupported_field")
        cases: list[Any] = [{"tools": TOOLS, "tool_choice": "none"}, {}]
        for further in cases:
            answer = await client.chat.completions.create(
                model="tiny", messages=USER, max_tokens=40, **further
            )
            assert answer.choices[0].message.content == WRITTEN
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(
            model="tiny", messages=USER, extra_body={"thinking_token_budget": 5}
        )
    refused = caught.value
    assert (refused.param, refused.code) == ("thinking_token_budget", "unsupported_field")
    assert mesh.num_legs == 0
