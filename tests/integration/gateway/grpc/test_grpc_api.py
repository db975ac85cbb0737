"""Tests the gateway's gRPC API: its answers, its typed errors, its health service and its
reflection.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from pdmesh.net.grpc import rpc
from pdmesh.v1 import inference_service_pb2 as pb
from pdmesh.v1.common_pb2 import FINISH_REASON_LENGTH
from pdmesh.v1.inference_service_pb2_grpc import InferenceServiceStub
from tests.fakes.gateway_mesh import GatewayMesh, gateway_mesh
from tests.support.attack.raw_http2 import Halves
from tests.support.waiting import until


@pytest.fixture
async def channel(mesh: GatewayMesh) -> AsyncIterator[grpc.aio.Channel]:
    async with rpc.channel(f"127.0.0.1:{mesh.gateway.grpc.port}") as channel:
        yield channel


async def test_generate_and_its_stream_agree_with_the_reference(
    mesh: GatewayMesh, channel: grpc.aio.Channel
) -> None:
    stub = InferenceServiceStub(channel)
    request = pb.GenerateRequest(text="abc", params=pb.GenerationParams(max_tokens=20))
    whole = await stub.Generate(request)
    parts = [p async for p in stub.GenerateStream(pb.GenerateStreamRequest(request=request))]
    assert whole.text == mesh.expected_text("abc", 20)
    assert "".join(p.text for p in parts) == whole.text
    assert [t for p in parts for t in p.token_ids] == list(whole.token_ids)
    assert parts[-1].finish_reason == whole.finish_reason == FINISH_REASON_LENGTH
    assert parts[-1].usage == whole.usage
    assert whole.usage.num_completion_tokens == 20


async def test_chat_and_its_stream_agree(mesh: GatewayMesh, channel: grpc.aio.Channel) -> None:
    stub = InferenceServiceStub(channel)
    request = pb.ChatRequest(
        model="tiny",
        messages=[pb.ChatMessage(role="user", content="hi")],
        params=pb.GenerationParams(max_tokens=10),
    )
    whole = await stub.Chat(request)
    parts = [p async for p in stub.ChatStream(pb.ChatStreamRequest(request=request))]
    assert whole.message.content == mesh.expected_text(mesh.chat_prompt("hi"), 10)
    assert "".join(p.content for p in parts) == whole.message.content
    assert (await stub.ListModels(pb.ListModelsRequest())).models == ["tiny"]


@pytest.mark.fault("F30")
async def test_an_invalid_field_is_named(channel: grpc.aio.Channel) -> None:
    stub = InferenceServiceStub(channel)
    request = pb.GenerateRequest(text="abc", params=pb.GenerationParams(temperature=float("nan")))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Generate(request)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert rpc.from_rpc_error(caught.value).field == "temperature"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Generate(pb.GenerateRequest(model="nope", text="abc"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.fault("F30")
async def test_garbage_is_an_invalid_argument_without_parser_text(
    channel: grpc.aio.Channel,
) -> None:
    untyped: Any = channel.unary_unary  # grpc-stubs requires serializers
    call = untyped("/pdmesh.v1.InferenceService/Generate")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(b"\xff\xff\xff\xff")
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "Decode" not in (caught.value.details() or "")


@pytest.mark.fault("F27")
async def test_cancelling_a_stream_frees_its_legs(
    mesh: GatewayMesh, channel: grpc.aio.Channel
) -> None:
    for instance in mesh.instances.values():
        instance.step_s = 0.01
    request = pb.GenerateRequest(text="abc", params=pb.GenerationParams(max_tokens=4000))
    stream = InferenceServiceStub(channel).GenerateStream(pb.GenerateStreamRequest(request=request))
    async for part in stream:
        if part.token_ids:
            break
    stream.cancel()
    await until(lambda: mesh.num_legs == 0 and mesh.gateway.frontend.num_calls == 0)


async def test_health_and_reflection_answer(channel: grpc.aio.Channel) -> None:
    stub = health_pb2_grpc.HealthStub(channel)
    name = "pdmesh.v1.InferenceService"

    async def is_serving() -> bool:
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=name))
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    await until(is_serving)
    asks = reflection_pb2.ServerReflectionRequest(list_services="")
    replies = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([asks]))
    async for reply in replies:
        names = {s.name for s in reply.list_services_response.service}
        assert {name, "grpc.health.v1.Health"} <= names


async def test_choices_and_salts_have_the_same_effect_as_over_http(
    mesh: GatewayMesh, channel: grpc.aio.Channel
) -> None:
    stub = InferenceServiceStub(channel)
    params = pb.GenerationParams(max_tokens=20)
    request = pb.GenerateRequest(text="abc", params=params, n=3, cache_salt="mine")
    whole = await stub.Generate(request)
    expected = mesh.expected_text("abc", 20)
    assert whole.text == expected
    assert [(c.index, c.text) for c in whole.other_choices] == [(1, expected), (2, expected)]
    assert whole.usage.num_completion_tokens == 60
    parts = [p async for p in stub.GenerateStream(pb.GenerateStreamRequest(request=request))]
    for index in range(3):
        own = [p for p in parts if p.index == index]
        assert "".join(p.text for p in own) == expected
        assert own[-1].finish_reason == FINISH_REASON_LENGTH
    assert [p.HasField("usage") for p in parts] == [False] * (len(parts) - 1) + [True]
    await stub.Generate(pb.GenerateRequest(text="abc", params=params))
    commands = [c for i in mesh.instances.values() for c in i.prefills]
    by_salt = {c.cache_salt for c in commands}
    assert len(by_salt) == 2, "a different salt gives every block a different name"


@pytest.mark.fault("F30")
@pytest.mark.parametrize("field", ["model", "scenario", "chat_id", "cache_salt"])
async def test_the_lengths_of_names_are_bounded(channel: grpc.aio.Channel, field: str) -> None:
    stub = InferenceServiceStub(channel)
    message = pb.ChatMessage(role="user", content="x")
    long: dict[str, Any] = {field: "x" * 257}
    for call in (
        stub.Generate(pb.GenerateRequest(text="abc", **long)),
        stub.Chat(pb.ChatRequest(messages=[message], **long)),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert rpc.from_rpc_error(caught.value).field == field


@pytest.mark.fault("F32")
async def test_no_string_holds_a_nul(channel: grpc.aio.Channel) -> None:
    stub = InferenceServiceStub(channel)
    fine, nul = pb.ChatMessage(role="user", content="x"), "a\0b"
    # The type is Any because the values are requests of two methods.
    wrong: dict[str, Any] = {
        "text": pb.GenerateRequest(text=nul),
        "model": pb.GenerateRequest(text="x", model=nul),
        "scenario": pb.GenerateRequest(text="x", scenario=nul),
        "chat_id": pb.ChatRequest(messages=[fine], chat_id=nul),
        "cache_salt": pb.ChatRequest(messages=[fine], cache_salt=nul),
        "stop": pb.ChatRequest(messages=[fine], params=pb.GenerationParams(stop=["x", nul])),
        "messages[1].content": pb.ChatRequest(
            messages=[fine, pb.ChatMessage(role="user", content=nul)]
        ),
        "messages[0].role": pb.ChatRequest(messages=[pb.ChatMessage(role="user\0")]),
    }
    for field, request in wrong.items():
        is_chat = isinstance(request, pb.ChatRequest)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await (stub.Chat(request) if is_chat else stub.Generate(request))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert rpc.from_rpc_error(caught.value).field == field


@pytest.mark.fault("F30")
async def test_too_many_choices_tokens_or_bytes_are_refused(channel: grpc.aio.Channel) -> None:
    stub = InferenceServiceStub(channel)
    wrong = {
        "n": pb.GenerateRequest(text="abc", n=17),
        "seed": pb.GenerateRequest(text="abc", params=pb.GenerationParams(seed=(1 << 63) - 1)),
        "token_ids": pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1] * 5000)),
        "prompt": pb.GenerateRequest(text="x" * 100_000),
    }
    for field, request in wrong.items():
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Generate(request)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert rpc.from_rpc_error(caught.value).field == field
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Generate(pb.GenerateRequest(text="x" * (9 << 20)))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.fault("F28")
async def test_a_client_that_does_not_read_its_stream_is_cut(tmp_path: Path) -> None:
    """The client's flow-control window must be small and fixed. By itself, gRPC would let the
    window grow by megabytes, and a slow machine would take long to fill it.
    """
    window = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1 << 16))
    async with gateway_mesh(tmp_path, write_timeout_s=0.5, chunk_interval_ms=0) as mesh:
        for instance in mesh.instances.values():
            instance.max_model_len = 1 << 22
            mesh.register(instance.record())
        address = f"127.0.0.1:{mesh.gateway.grpc.port}"
        async with grpc.aio.insecure_channel(address, options=window) as channel:
            params = pb.GenerationParams(max_tokens=1 << 20)
            request = pb.GenerateRequest(text="abc", params=params)
            stub = InferenceServiceStub(channel)
            stream = stub.GenerateStream(pb.GenerateStreamRequest(request=request))
            await stream.read()
            await until(lambda: mesh.gateway.frontend.num_calls == 0, within_s=90.0)
            await until(lambda: mesh.num_legs == 0)
            assert mesh.gateway.observer.num_ended["cancelled"] == 1
            other = await stub.Generate(
                pb.GenerateRequest(text="abc", params=pb.GenerationParams(max_tokens=3))
            )
            assert other.text == mesh.expected_text("abc", 3)


@pytest.mark.fault("F30", "F31")
@pytest.mark.parametrize(
    "method",
    [
        b"/pdmesh.v1.InferenceService/Generate",
        b"/pdmesh.v1.InferenceService/GenerateStream",
        b"/grpc.health.v1.Health/Check",
        b"/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    ],
)
async def test_messages_without_their_end_are_given_up(tmp_path: Path, method: bytes) -> None:
    """By itself, gRPC would wait forever for the rest of a message and keep the part that has
    arrived.
    """
    mib = 1 << 20
    async with gateway_mesh(
        tmp_path, max_body_bytes=mib, max_incoming_bytes=4 * mib, receive_timeout_s=1.0
    ) as mesh:
        halves = Halves(method, 40, mib - 1000)
        async with asyncio.timeout(60):
            await halves.run(mesh.gateway.grpc.port, "127.0.0.1")
        assert not halves.is_ended, "the connection is good for other calls"
        assert halves.ended == set(halves.streams)
        async with rpc.channel(f"127.0.0.1:{mesh.gateway.grpc.port}") as channel:
            answer = await InferenceServiceStub(channel).Generate(
                pb.GenerateRequest(text="abc", params=pb.GenerationParams(max_tokens=5))
            )
        assert answer.text == mesh.expected_text("abc", 5)
