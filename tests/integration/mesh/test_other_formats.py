"""Runs the official clients of the Responses and Messages APIs against a mesh of processes with
simulated engines.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import openai
import pytest
import pytest_asyncio

from pdmesh.launcher.mesh import Mesh
from tests.support.sites import fleet
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUM_TOKENS = 200
LONG: dict[str, Any] = {"ignore_eos": True, "temperature": 0}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Mesh]:
    async with Mesh(fleet.two_by_two(), tmp_path_factory.mktemp("mesh")) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(mesh: Mesh) -> AsyncIterator[openai.AsyncOpenAI]:
    url = f"{mesh.http_url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def claude(mesh: Mesh) -> AsyncIterator[anthropic.AsyncAnthropic]:
    url = mesh.http_url
    async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client:
        yield client


async def chat_text(client: openai.AsyncOpenAI, content: str) -> str:
    answer = await client.chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": content}],
        max_tokens=NUM_TOKENS,
        extra_body=LONG,
    )
    return answer.choices[0].message.content or ""


async def response_text(client: openai.AsyncOpenAI, content: str, begun: asyncio.Event) -> str:
    numbers: list[int] = []
    text = ""
    stream = await client.responses.create(
        model="default",
        input=content,
        max_output_tokens=NUM_TOKENS,
        stream=True,
        extra_body=LONG,
    )
    async for event in stream:
        numbers.append(event.sequence_number)
        if event.type == "response.output_text.delta":
            begun.set()
            text += event.delta
        elif event.type == "response.incomplete":
            assert event.response.output_text == text
    assert numbers == list(range(len(numbers)))
    return text


async def message_text(claude: anthropic.AsyncAnthropic, content: str, begun: asyncio.Event) -> str:
    async with claude.messages.stream(
        model="default",
        messages=[{"role": "user", "content": content}],
        max_tokens=NUM_TOKENS,
        extra_body=LONG,
    ) as stream:
        text = ""
        async for piece in stream.text_stream:
            begun.set()
            text += piece
        message = await stream.get_final_message()
    assert [b.text for b in message.content if b.type == "text"] == [text]
    assert message.stop_reason == "max_tokens"
    return text


@pytest.mark.fault("F7")
async def test_streams_are_whole_even_if_decodes_are_killed_within_them(
    mesh: Mesh, client: openai.AsyncOpenAI, claude: anthropic.AsyncAnthropic
) -> None:
    asked = [f"question {number}" for number in range(6)]
    expected = [await chat_text(client, content) for content in asked]
    for victim in ("decode-0", "decode-1"):
        begun = [asyncio.Event() for _ in range(2 * len(asked))]
        running = [
            *map(response_text, [client] * len(asked), asked, begun),
            *map(message_text, [claude] * len(asked), asked, begun[len(asked) :]),
        ]
        tasks = [asyncio.create_task(work) for work in running]
        await asyncio.gather(*(event.wait() for event in begun))
        mesh.kill(victim)
        assert await asyncio.gather(*tasks) == expected * 2
        await mesh.wait_ready([victim])


async def test_a_conversation_continues_after_the_loss_of_its_gateway(
    mesh: Mesh, client: openai.AsyncOpenAI
) -> None:
    first = await client.responses.create(model="default", input="one", max_output_tokens=8)
    await mesh.restart("gateway-0")
    second = await client.responses.create(
        model="default", input="two", max_output_tokens=8, previous_response_id=first.id
    )
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.input_tokens > first.usage.total_tokens
    assert (await client.responses.retrieve(second.id)).output_text == second.output_text


@pytest.mark.fault("F15")
async def test_calls_are_answered_while_valkey_is_away(
    mesh: Mesh, client: openai.AsyncOpenAI
) -> None:
    asked: dict[str, Any] = {"model": "default", "input": "one", "temperature": 0}
    kept = await client.responses.create(max_output_tokens=8, **asked)
    mesh.kill("valkey", signal.SIGSTOP)
    answer: Any = await client.responses.create(max_output_tokens=8, **asked)
    assert answer.output_text == kept.output_text
    assert answer.store is False
    with pytest.raises(openai.InternalServerError):
        await client.responses.retrieve(kept.id)
    mesh.kill("valkey", signal.SIGCONT)

    async def is_back() -> bool:
        again: Any = await client.responses.create(
            model="default", input="one", max_output_tokens=2
        )
        return bool(again.store)

    await until(is_back)
    assert (await client.responses.retrieve(kept.id)).id == kept.id
