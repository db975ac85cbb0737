"""Tests that `responses` of the official openai client works with a gateway without changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
import pytest

from pdmesh.services.gateway.http.responses import store
from pdmesh.services.gateway.text.chat_template import Conversation
from pdmesh.v1.common_pb2 import ROLE_DECODE, ROLE_PREFILL
from tests.fakes.fake_instance import FakeInstance
from tests.fakes.gateway_mesh import GatewayMesh, gateway_mesh
from tests.support.sites import servers
from tests.support.waiting import until

Said = tuple[str, Any]


def expected_of(mesh: GatewayMesh, num_tokens: int, *messages: Said) -> str:
    prompt = mesh.tokenizer.render_chat(
        Conversation([{"role": role, "content": content} for role, content in messages])
    )
    return mesh.expected_text(prompt, num_tokens)


async def test_a_response_equals_the_chat_with_the_same_conversation(
    mesh: GatewayMesh, client: openai.AsyncOpenAI
) -> None:
    answer = await client.responses.create(
        model="default",
        instructions="be brief",
        input=[
            {"role": "user", "content": "hello"},
            {"type": "message", "role": "assistant", "content": [
                {"type": "output_text", "text": "hi", "annotations": []}], "id": "msg_1",
             "status": "completed"},
            {"role": "user", "content": [{"type": "input_text", "text": t} for t in "ab"]},
        ],
        max_output_tokens=12,
        metadata={"k": "v"},
    )  # fmt: skip
    said = ("system", "be brief"), ("user", "hello"), ("assistant", "hi"), ("user", ["a", "b"])
    assert answer.output_text == expected_of(mesh, 12, *said)
    assert (answer.status, answer.model) == ("incomplete", "tiny")
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    (message,) = answer.output
    assert message.type == "message"
    assert (message.status, message.role) == ("incomplete", "assistant")
    assert (answer.instructions, answer.metadata) == ("be brief", {"k": "v"})
    assert answer.usage is not None
    assert answer.usage.output_tokens == 12
    assert answer.usage.input_tokens_details.cached_tokens == 16
    assert answer.usage.total_tokens == answer.usage.input_tokens + 12


async def test_a_stream_has_the_documented_events_in_order(
    mesh: GatewayMesh, client: openai.AsyncOpenAI
) -> None:
    expected = expected_of(mesh, 40, ("user", "hello"))
    async with client.responses.stream(model="tiny", input="hello", max_output_tokens=40) as stream:
        text = "".join([e.delta async for e in stream if e.type == "response.output_text.delta"])
    assert text == expected
    events: list[Any] = [
        event
        async for event in await client.responses.create(
            model="tiny", input="hello", max_output_tokens=40, stream=True
        )
    ]
    kinds = [event.type.removeprefix("response.") for event in events]
    pieces = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert len(pieces) > 1
    assert kinds == [
        "created", "in_progress", "output_item.added", "content_part.added",
        *["output_text.delta"] * len(pieces),
        "output_text.done", "content_part.done", "output_item.done", "incomplete",
    ]  # fmt: skip
    assert [event.sequence_number for event in events] == list(range(len(events)))
    *_, text_done, part_done, item_done, last = events
    assert "".join(pieces) == text_done.text == part_done.part.text == expected
    assert item_done.item == last.response.output[0]
    assert last.response.output_text == expected
    assert {e.item_id for e in events if hasattr(e, "item_id")} == {item_done.item.id}
    assert events[0].response.id == last.response.id
    assert last.response.store is True


async def test_a_conversation_continues_from_the_previous_response(
    mesh: GatewayMesh, client: openai.AsyncOpenAI
) -> None:
    """The instructions of an earlier request do not apply to the next one."""
    first = await client.responses.create(
        model="tiny", input="one", max_output_tokens=6, instructions="first"
    )
    second = await client.responses.create(
        model="tiny", input="two", max_output_tokens=6, previous_response_id=first.id
    )
    said: list[Said] = [("user", "one"), ("assistant", first.output_text), ("user", "two")]
    assert second.output_text == expected_of(mesh, 6, *said)
    third = await client.responses.create(
        model="tiny",
        input=[{"role": "user", "content": "three"}],
        max_output_tokens=6,
        previous_response_id=second.id,
        instructions="again",
    )
    said = [("system", "again"), *said, ("assistant", second.output_text), ("user", "three")]
    assert third.output_text == expected_of(mesh, 6, *said)
    assert third.previous_response_id == second.id
    again = await client.responses.retrieve(third.id)
    assert again == third
    items = await client.responses.input_items.list(third.id)
    shown: list[Any] = [item async for item in items]
    assert [item.role for item in shown] == ["user", "assistant", "user", "assistant", "user"]
    assert [item.content[0].text for item in shown][::2] == ["three", "two", "one"]
    orders: list[tuple[Literal["asc", "desc"], list[Any]]] = [("desc", shown), ("asc", shown[::-1])]
    for order, wanted in orders:
        pages = await client.responses.input_items.list(third.id, order=order, limit=2)
        assert (len(pages.data), pages.has_more) == (2, True)
        assert [item async for item in pages] == wanted, "three pages, one after the other"
    for asked in ({"order": "up"}, {"limit": 0}, {"limit": 101}, {"after": "msg_other"}):
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.input_items.list(third.id, extra_query=asked)
        assert refused.value.param == next(iter(asked))
    with pytest.raises(openai.BadRequestError) as refused:
        await client.responses.retrieve(third.id, stream=True)
    assert refused.value.param == "stream"
    counted = await client.responses.input_tokens.count(
        model="tiny",
        input=[{"role": "user", "content": "three"}],
        previous_response_id=second.id,
        instructions="again",
    )
    assert third.usage is not None
    assert counted.input_tokens == third.usage.input_tokens
    with pytest.raises(openai.NotFoundError) as unknown:
        await client.responses.input_tokens.count(
            model="tiny", input="a", previous_response_id="resp_" + "0" * 24
        )
    assert unknown.value.param == "previous_response_id"
    empty = await client.responses.create(
        model="tiny", input=[], instructions="be kind", max_output_tokens=2
    )
    assert [item async for item in await client.responses.input_items.list(empty.id)] == []
    await client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(first.id)
    assert (await client.responses.retrieve(second.id)).id == second.id


async def test_a_response_that_is_not_stored_cannot_be_found(
    mesh: GatewayMesh, client: openai.AsyncOpenAI
) -> None:
    answer = await client.responses.create(
        model="tiny", input="x", max_output_tokens=3, store=False
    )
    assert answer.model_extra is not None
    assert answer.model_extra["store"] is False
    for name in (answer.id, "resp_", "resp_" + "0" * 24, "../x", "x" * 1000):
        with pytest.raises(openai.NotFoundError) as caught:
            await client.responses.retrieve(name)
        assert caught.value.code == "response_not_found"
        with pytest.raises(openai.NotFoundError) as caught:
            await client.responses.create(model="tiny", input="x", previous_response_id=name)
        assert caught.value.param == "previous_response_id"
        with pytest.raises(openai.NotFoundError):
            await client.responses.delete(name)


@pytest.mark.fault("F15")
@pytest.mark.parametrize("stream", [False, True])
async def test_without_redis_calls_are_answered_and_lookups_refused(
    mesh: GatewayMesh,
    client: openai.AsyncOpenAI,
    valkey: servers.TestServer,
    stream: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = await client.responses.create(model="tiny", input="x", max_output_tokens=3)
    monkeypatch.setattr(store, "TIMEOUT_S", 0.2)
    valkey.pause()
    expected = expected_of(mesh, 3, ("user", "x"))
    answer: Any = await client.responses.create(
        model="tiny", input="x", max_output_tokens=3, stream=stream
    )
    if stream:
        answer = [event async for event in answer][-1].response
    assert answer.output_text == expected
    assert answer.store is False
    for lookup in (
        client.responses.retrieve(before.id),
        client.responses.delete(before.id),
        client.responses.create(model="tiny", input="x", previous_response_id=before.id),
    ):
        with pytest.raises(openai.InternalServerError) as caught:
            await lookup
        assert (caught.value.status_code, caught.value.code) == (503, "unavailable")
        assert caught.value.response.headers["retry-after"]
    valkey.resume()


@pytest.mark.fault("F7")
async def test_a_decode_that_dies_in_the_middle_changes_nothing(
    mesh: GatewayMesh, client: openai.AsyncOpenAI
) -> None:
    for decode in (i for i in mesh.instances.values() if i.role == ROLE_DECODE):
        decode.breaks_at = 4
    async with client.responses.stream(model="tiny", input="hello", max_output_tokens=12) as stream:
        numbers = [event.sequence_number async for event in stream]
    assert numbers == sorted(set(numbers))
    assert len(numbers) == numbers[-1] + 1
    answer = await client.responses.create(model="tiny", input="hello", max_output_tokens=12)
    assert answer.output_text == expected_of(mesh, 12, ("user", "hello"))


async def test_a_stream_that_cannot_continue_ends_with_a_failed_response(tmp_path: Path) -> None:
    async with (
        gateway_mesh(tmp_path, max_migrations=0, responses_max_count=0) as mesh,
        openai.AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key="none", max_retries=0) as client,
    ):
        decode = next(i for i in mesh.instances.values() if i.role == ROLE_DECODE)
        decode.breaks_at = 4
        stream = await client.responses.create(
            model="tiny", input="hello", max_output_tokens=12, stream=True
        )
        events: list[Any] = [event async for event in stream]
        kinds = [event.type for event in events]
        assert kinds[-4:] == [
            "response.output_text.done", "response.content_part.done",
            "response.output_item.done", "response.failed",
        ]  # fmt: skip
        assert [event.sequence_number for event in events] == list(range(len(events)))
        last = events[-1].response
        assert last.status == "failed"
        assert last.error is not None
        assert last.output_text
        assert expected_of(mesh, 12, ("user", "hello")).startswith(last.output_text)


async def test_a_client_that_leaves_ends_its_request(
    mesh: GatewayMesh, client: openai.AsyncOpenAI
) -> None:
    stream = await client.responses.create(
        model="tiny", input="hello", max_output_tokens=3000, stream=True
    )
    async for event in stream:
        if event.type == "response.output_text.delta":
            break
    await stream.close()
    await until(lambda: mesh.num_legs == 0)


async def test_log_probabilities_come_with_the_text(tmp_path: Path) -> None:
    async with (
        gateway_mesh(tmp_path, 0, 0, responses_max_count=0) as mesh,
        openai.AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key="none", max_retries=0) as client,
    ):
        for role, name in ((ROLE_PREFILL, "prefill-0"), (ROLE_DECODE, "decode-0")):
            await mesh.add(FakeInstance(role, name, supports_logprobs=True))
        asked: dict[str, Any] = {
            "model": "tiny", "input": "hello", "max_output_tokens": 8, "top_logprobs": 2,
            "include": ["message.output_text.logprobs"],
        }  # fmt: skip
        whole = await client.responses.create(**asked)
        events = [e async for e in await client.responses.create(**asked, stream=True)]
        deltas = [lp for e in events if e.type.endswith("text.delta") for lp in e.logprobs]
        assert len(deltas) == 8
        content: Any = whole.output[0]
        assert [lp.logprob for lp in deltas] == [lp.logprob for lp in content.content[0].logprobs]
        assert all(len(lp.top_logprobs) == 2 for lp in deltas)


USER: dict[str, Any] = {"role": "user", "content": "x"}
CALL = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"content": "x"}]}, "input[0].role"),
        ({"input": [USER, {"role": "user"}]}, "input[1].content"),
        ({"instructions": "i", "input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
         "input[0].content[0].image_url"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
         "input[0].content[0].text"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type"),
        ({"input": [USER, {"type": "function_call_output", "call_id": "c", "output": "x"}]},
         "input[1].call_id"),
        ({"input": [CALL | {"name": ""}]}, "input[0].name"),
        ({"input": [USER, CALL, CALL | {"call_id": ""}]}, "input[2].call_id"),
        ({"input": "x" * 100_000}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 100_000}, "max_output_tokens"),
        ({"temperature": 9}, "temperature"),
        ({"top_logprobs": 99, "include": ["message.output_text.logprobs"]}, "top_logprobs"),
        ({"metadata": {"k": "v" * 1000}}, "metadata.k"),
        ({"metadata": {"k": 1}}, "metadata.k"),
        ({"background": True}, "stream"),
        ({"background": True, "stream": False, "store": False}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "name": ""}]}, "tools[0].name"),
        ({"tool_choice": {"type": "function", "name": "no"}}, "tool_choice.name"),
        ({"tool_choice": "maybe"}, "tool_choice"),
        ({"text": {"verbosity": "high"}}, "text.verbosity"),
        ({"text": {"format": {"type": "odd"}}}, "text.format"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"stream": False, "stream_options": {}}, "stream_options"),
    ],
)  # fmt: skip
async def test_bad_input_is_refused_with_the_field(
    mesh: GatewayMesh, changed: dict[str, Any], field: str
) -> None:
    async with httpx.AsyncClient(base_url=mesh.url) as http:
        body = {"model": "tiny", "input": "x", "max_output_tokens": 5, "stream": True} | changed
        answer = await http.post("/v1/responses", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
    assert error["param"] == field
    assert len(answer.content) < 2000


async def test_each_event_has_its_name_in_its_data_too(mesh: GatewayMesh) -> None:
    async with httpx.AsyncClient(base_url=mesh.url) as http:
        body = {"model": "tiny", "input": "x", "max_output_tokens": 5, "stream": True}
        answer = await http.post("/v1/responses", json=body)
    pieces = answer.text.split("\n\n")
    assert pieces.pop() == ""
    for piece in pieces:
        name, data = piece.split("\n")
        assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"
