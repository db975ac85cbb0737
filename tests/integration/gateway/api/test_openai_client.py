"""Tests that the official openai client works with a gateway without changes."""

from __future__ import annotations

import openai
import pytest
from openai.types import Completion

from tests.fakes.gateway_mesh import GatewayMesh


async def test_a_streamed_chat_reads_as_the_reference(
    mesh: GatewayMesh, client: openai.AsyncOpenAI
) -> None:
    stream = await client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "hello"}],
        max_tokens=40,
        stream=True,
        stream_options={"include_usage": True},
    )
    text, reasons, usage = "", [], None
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reasons.append(choice.finish_reason)
    assert text == mesh.expected_text(mesh.chat_prompt("hello"), 40)
    assert [r for r in reasons if r] == ["length"]
    assert usage is not None
    assert usage.completion_tokens == 40
    assert usage.prompt_tokens == len(mesh.chat_prompt("hello"))


async def test_a_whole_chat_carries_usage_and_the_cached_tokens(
    mesh: GatewayMesh, client: openai.AsyncOpenAI
) -> None:
    answer = await client.chat.completions.create(
        model="default", messages=[{"role": "user", "content": "hello"}], max_tokens=12
    )
    assert answer.choices[0].message.content == mesh.expected_text(mesh.chat_prompt("hello"), 12)
    assert answer.model == "tiny"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 11


@pytest.mark.parametrize("stream", [False, True])
async def test_one_token_ends_at_prefill(
    mesh: GatewayMesh, client: openai.AsyncOpenAI, stream: bool
) -> None:
    answer = await client.completions.create(
        model="tiny", prompt="abc", max_tokens=1, stream=stream
    )
    if isinstance(answer, Completion):
        text = answer.choices[0].text
    else:
        text = "".join([c.choices[0].text async for c in answer])
    assert text == mesh.expected_text("abc", 1)
    assert not any(i.starts for i in mesh.instances.values())
