"""Tests that the official anthropic client works with a gateway without changes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest

from pdmesh.services.gateway.text.chat_template import Conversation
from pdmesh.v1.common_pb2 import ROLE_DECODE
from tests.fakes.gateway_mesh import GatewayMesh, gateway_mesh
from tests.support.waiting import until

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
IN_ORDER = [
    "message_start",
    "content_block_start",
    "content_block_stop",
    "message_delta",
    "message_stop",
]


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


@pytest.fixture
async def claude(mesh: GatewayMesh) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=mesh.url, api_key="none", max_retries=0) as client:
        yield client


def prompt_of(mesh: GatewayMesh, *messages: tuple[str, Any]) -> str:
    return mesh.tokenizer.render_chat(
        Conversation([{"role": r, "content": c} for r, c in messages])
    )


async def test_a_message_equals_the_chat_with_the_same_conversation(
    mesh: GatewayMesh, claude: anthropic.AsyncAnthropic
) -> None:
    answer = await claude.messages.create(
        model="default",
        max_tokens=12,
        system=[
            {"type": "text", "text": "x-anthropic-billing-header: 1234"},
            {"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}},
        ],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "hello"}]},
            {"role": "assistant", "content": "hi"},
            {"role": "user", "content": [{"type": "text", "text": t} for t in "ab"]},
        ],
        metadata={"user_id": "u"},
    )  # fmt: skip
    prompt = prompt_of(
        mesh, ("system", "be brief"), ("user", "hello"), ("assistant", "hi"), ("user", ["a", "b"])
    )
    (block,) = answer.content
    assert block.type == "text"
    assert block.text == mesh.expected_text(prompt, 12)
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", "tiny")
    assert (answer.stop_reason, answer.stop_sequence) == ("max_tokens", None)
    cached = answer.usage.cache_read_input_tokens
    assert cached == 16
    assert answer.usage.input_tokens + cached == len(prompt)
    assert answer.usage.output_tokens == 12
    assert answer._request_id == f"req-{answer.id.removeprefix('msg_')}"


async def test_a_stream_has_the_documented_events_and_the_same_text(
    mesh: GatewayMesh, claude: anthropic.AsyncAnthropic
) -> None:
    expected = mesh.expected_text(mesh.chat_prompt("hello"), 40)
    async with claude.messages.stream(model="tiny", max_tokens=40, messages=HELLO) as stream:
        text = "".join([piece async for piece in stream.text_stream])
        message = await stream.get_final_message()
    assert text == expected
    assert [b.text for b in message.content if b.type == "text"] == [expected]
    assert message.stop_reason == "max_tokens"
    assert message.usage.output_tokens == 40
    events = await claude.messages.create(model="tiny", max_tokens=40, messages=HELLO, stream=True)
    kinds = [event.type async for event in events]
    assert [k for k in kinds if k != "content_block_delta"] == IN_ORDER
    assert set(kinds[2:-3]) == {"content_block_delta"}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_message_names_the_stop_sequence_that_ended_it(
    mesh: GatewayMesh, claude: anthropic.AsyncAnthropic, stream: bool
) -> None:
    whole = mesh.expected_text(mesh.chat_prompt("hello"), 60)
    stop = whole[20:23]
    asked: dict[str, Any] = {"stop_sequences": ["never", stop], "messages": HELLO}
    if stream:
        async with claude.messages.stream(model="tiny", max_tokens=60, **asked) as events:
            answer: Any = await events.get_final_message()
    else:
        answer = await claude.messages.create(model="tiny", max_tokens=60, **asked)
    assert answer.content[0].text == whole[: whole.index(stop)]
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", stop)


async def test_the_counted_tokens_equal_those_of_the_message(
    mesh: GatewayMesh, claude: anthropic.AsyncAnthropic
) -> None:
    found = await claude.messages.count_tokens(model="tiny", system="be brief", messages=HELLO)
    assert found.input_tokens == len(prompt_of(mesh, ("system", "be brief"), ("user", "hello")))


@pytest.mark.fault("F7")
async def test_a_decode_that_dies_in_the_middle_changes_nothing(
    mesh: GatewayMesh, claude: anthropic.AsyncAnthropic
) -> None:
    for decode in (i for i in mesh.instances.values() if i.role == ROLE_DECODE):
        decode.breaks_at = 4
    async with claude.messages.stream(model="tiny", max_tokens=12, messages=HELLO) as stream:
        message: Any = await stream.get_final_message()
    assert message.content[0].text == mesh.expected_text(mesh.chat_prompt("hello"), 12)


async def test_a_stream_that_cannot_continue_ends_with_an_error_event(
    tmp_path: Path,
) -> None:
    """The gateway sends all text that came before the error, and nothing after the error."""
    async with (
        gateway_mesh(tmp_path, max_migrations=0) as mesh,
        httpx.AsyncClient(base_url=mesh.url, timeout=30) as http,
    ):
        decode = next(i for i in mesh.instances.values() if i.role == ROLE_DECODE)
        decode.breaks_at = 4
        body = {"model": "tiny", "max_tokens": 12, "messages": HELLO, "stream": True}
        answer = await http.post("/v1/messages", json=body)
        events = events_of(answer.text)
        assert [kind for kind, _ in events[:2]] == IN_ORDER[:2]
        kind, last = events[-1]
        assert (kind, last["type"], last["error"]["type"]) == ("error", "error", "overloaded_error")
        assert not {"message_delta", "message_stop"} & {kind for kind, _ in events}
        pieces = [e["delta"]["text"] for k, e in events if k == "content_block_delta"]
        expected = mesh.expected_text(mesh.chat_prompt("hello"), 12)
        assert "".join(pieces)
        assert expected.startswith("".join(pieces))
        claude = anthropic.AsyncAnthropic(base_url=mesh.url, api_key="none", max_retries=0)
        decode.breaks_at = 4
        with pytest.raises(anthropic.APIStatusError):
            async with claude.messages.stream(
                model="tiny", max_tokens=12, messages=HELLO
            ) as stream:
                await stream.get_final_message()
        await claude.close()


async def test_a_client_that_leaves_ends_its_request(
    mesh: GatewayMesh, claude: anthropic.AsyncAnthropic
) -> None:
    async with claude.messages.stream(model="tiny", max_tokens=3000, messages=HELLO) as stream:
        async for _ in stream.text_stream:
            break
    await until(lambda: mesh.num_legs == 0)


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 100_000}, "max_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [*HELLO, {"role": "user"}]}, "messages[1].content"),
        ({"messages": [user([{"type": "image"}])]}, "messages[0].content[0].source"),
        ({"messages": [user([{"type": "text"}])]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": "x" * 100_000}]}, "messages"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"top_k": 1.5}, "top_k"),
        ({"top_k": -7}, "top_k"),
        ({"container": "c"}, "container"),
        ({"seed": 1 << 64}, "seed"),
    ],
)  # fmt: skip
async def test_bad_input_is_refused_with_the_field(
    mesh: GatewayMesh, changed: dict[str, Any], field: str
) -> None:
    async with httpx.AsyncClient(base_url=mesh.url) as http:
        body = {"model": "tiny", "max_tokens": 5, "messages": HELLO, "stream": True} | changed
        answer = await http.post("/v1/messages", json=body)
    found = answer.json()
    assert (answer.status_code, found["type"]) == (400, "error")
    assert found["error"]["type"] == "invalid_request_error"
    assert field in found["error"]["message"]
    assert found["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]
    assert len(answer.content) < 2000


async def test_errors_have_the_types_that_the_client_knows(
    mesh: GatewayMesh, claude: anthropic.AsyncAnthropic
) -> None:
    with pytest.raises(anthropic.NotFoundError) as caught:
        await claude.messages.create(model="none", max_tokens=5, messages=HELLO)
    assert caught.value.type == "not_found_error"
    async with httpx.AsyncClient(base_url=mesh.url) as http:
        answer = await http.get("/v1/messages")
        assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
        assert answer.json()["type"] == "error"
        ignored = {"model": "tiny", "max_tokens": 3, "messages": HELLO, "context_management": {}}
        answer = await http.post("/v1/messages?beta=true", json=ignored)
        assert answer.headers["x-pdmesh-ignored"] == "context_management"


def events_of(text: str) -> list[tuple[str, Any]]:
    """The names and data of a stream's events. Checks that each event has the same name in its
    `event` field and in its data.
    """
    events = []
    for piece in text.split("\n\n")[:-1]:
        name, data = piece.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append((event["type"], event))
    return events
