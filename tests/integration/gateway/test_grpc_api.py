"""The gRPC door: same answers, typed errors, health and reflection."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from pdmesh.net import rpc
from pdmesh.v1 import inference_service_pb2 as pb
from pdmesh.v1.common_pb2 import FINISH_REASON_LENGTH
from pdmesh.v1.inference_service_pb2_grpc import InferenceServiceStub
from tests.fakes.gateway_mesh import GatewayMesh
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
async def test_a_wrong_field_is_named(channel: grpc.aio.Channel) -> None:
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
    call = channel.unary_unary("/pdmesh.v1.InferenceService/Generate")
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
