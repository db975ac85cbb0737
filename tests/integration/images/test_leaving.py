"""Tests that a gateway frees the images of a request when the request is over, however it ends.

The garbage collector is off in these tests, because it runs rarely in a gateway.
"""

from __future__ import annotations

import asyncio
import base64
import gc
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import pytest_asyncio

from pdmesh.v1 import inference_service_pb2 as pb
from pdmesh.v1.inference_service_pb2_grpc import InferenceServiceStub
from tests.fakes.gateway_mesh import GatewayMesh
from tests.integration.images.image_mesh import image_mesh
from tests.support.images.files import data_uri, png
from tests.support.waiting import until

DATA = png(1) + bytes(100_000)
NUM_CLIENTS = 12
DOORS = ["chat", "messages", "responses"]
_EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]  # grpc-stubs lacks it
MANY = 3000  # the number of tokens of an answer for which no client waits


@pytest_asyncio.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[GatewayMesh]:
    async with image_mesh(tmp_path, ttft_s=60.0) as mesh:
        for instance in mesh.instances.values():
            instance.step_s = 0.005
        yield mesh


@pytest.fixture
def no_gc() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def asked(door: str, max_tokens: int = MANY, **fields: object) -> tuple[str, dict[str, Any]]:
    """The path and the body of a request with an image, for one of the APIs in DOORS."""
    common = {"model": "tiny", "ignore_eos": True, **fields}
    if door == "chat":
        image: dict[str, Any] = {"type": "image_url", "image_url": {"url": data_uri(DATA)}}
        messages = [{"role": "user", "content": [{"type": "text", "text": "What?"}, image]}]
        return "/v1/chat/completions", {
            "messages": messages, "max_tokens": max_tokens, **common,
        }  # fmt: skip
    if door == "messages":
        encoded = base64.b64encode(DATA).decode()
        source: Any = {"type": "base64", "media_type": "image/png", "data": encoded}
        content = [{"type": "text", "text": "What?"}, {"type": "image", "source": source}]
        messages = [{"role": "user", "content": content}]
        return "/v1/messages", {"messages": messages, "max_tokens": max_tokens, **common}
    part: Any = {"type": "input_image", "image_url": data_uri(DATA)}
    items = [{"role": "user", "content": [{"type": "input_text", "text": "What?"}, part]}]
    return "/v1/responses", {"input": items, "max_output_tokens": max_tokens, **common}


def num_held(mesh: GatewayMesh) -> int:
    return mesh.gateway.frontend.shared.images.num_held_bytes


@pytest.mark.fault("F27")
@pytest.mark.req("S128")
@pytest.mark.usefixtures("no_gc")
@pytest.mark.parametrize("door", DOORS)
async def test_clients_who_leave_in_a_stream_leave_no_image(mesh: GatewayMesh, door: str) -> None:
    path, body = asked(door, stream=True)

    async def leave() -> None:
        async with (
            httpx.AsyncClient(base_url=mesh.url, timeout=60) as client,
            client.stream("POST", path, json=body) as response,
        ):
            assert response.status_code == 200, await response.aread()
            async for _ in response.aiter_lines():
                assert num_held(mesh) >= len(DATA)
                break

    await asyncio.gather(*(leave() for _ in range(NUM_CLIENTS)))
    await until(lambda: not mesh.gateway.frontend.num_calls)
    await until(lambda: not num_held(mesh))


@pytest.mark.fault("F27")
@pytest.mark.req("S128")
@pytest.mark.usefixtures("no_gc")
@pytest.mark.parametrize("door", DOORS)
async def test_clients_who_leave_before_a_whole_answer_leave_no_image(
    mesh: GatewayMesh, door: str
) -> None:
    path, body = asked(door)
    all_held = asyncio.Event()

    async def leave() -> None:
        async with httpx.AsyncClient(base_url=mesh.url) as client:
            asking = asyncio.create_task(client.post(path, json=body, timeout=60))
            await all_held.wait()
            asking.cancel()
            await asyncio.wait([asking])

    leaving = [asyncio.create_task(leave()) for _ in range(NUM_CLIENTS)]
    await until(lambda: num_held(mesh) == NUM_CLIENTS * len(DATA))
    all_held.set()
    await asyncio.gather(*leaving)
    await until(lambda: not mesh.gateway.frontend.num_calls)
    await until(lambda: not num_held(mesh))


@pytest.mark.req("S128")
@pytest.mark.usefixtures("no_gc")
@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("door", DOORS)
async def test_an_answered_request_leaves_no_image(
    mesh: GatewayMesh, door: str, is_streamed: bool
) -> None:
    """The connection stays open after the answer, and no later request comes."""
    path, body = asked(door, 4, stream=is_streamed)
    async with httpx.AsyncClient(base_url=mesh.url, timeout=60) as client:
        response = await client.post(path, json=body)
        assert response.status_code == 200, response.text
        await until(lambda: not num_held(mesh))


@pytest.mark.fault("F2")
@pytest.mark.req("S128")
@pytest.mark.usefixtures("no_gc")
@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("door", DOORS)
async def test_a_request_that_fails_leaves_no_image(
    mesh: GatewayMesh, door: str, is_streamed: bool
) -> None:
    path, body = asked(door, stream=is_streamed)
    async with httpx.AsyncClient(base_url=mesh.url, timeout=60) as client:
        asking = asyncio.create_task(client.post(path, json=body))
        await until(lambda: num_held(mesh) > 0 and mesh.instances["decode-0"].legs != {})
        await mesh.gateway.frontend.drain(0.0)
        response = await asking
        assert response.status_code == (200 if is_streamed else 503), response.text
        await until(lambda: not num_held(mesh))


@pytest.mark.fault("F27")
@pytest.mark.req("S128")
@pytest.mark.usefixtures("no_gc")
@pytest.mark.parametrize("ends", ["leaves", "whole", "stream", "fails"])
async def test_grpc_leaves_no_image(mesh: GatewayMesh, ends: str) -> None:
    parts = [pb.ContentPart(text="What?"), pb.ContentPart(image=DATA)]
    num_tokens = 4 if ends in ("whole", "stream") else MANY
    request = pb.ChatRequest(
        model="tiny",
        messages=[pb.ChatMessage(role="user", content_parts=parts)],
        params=pb.GenerationParams(max_tokens=num_tokens, ignore_eos=True),
    )
    async with grpc.aio.insecure_channel(f"127.0.0.1:{mesh.gateway.grpc.port}") as channel:
        stub = InferenceServiceStub(channel)
        if ends == "whole":
            await stub.Chat(request)
        else:
            stream = stub.ChatStream(pb.ChatStreamRequest(request=request))
            await stream.read()
            if ends == "leaves":
                assert num_held(mesh) == len(DATA)
                stream.cancel()
            elif ends == "fails":
                await mesh.gateway.frontend.drain(0.0)
                with pytest.raises(grpc.aio.AioRpcError):
                    await _read_all(stream)
            else:
                await _read_all(stream)
        await until(lambda: not num_held(mesh))


async def _read_all(stream: Any) -> None:
    """The type is Any because grpc-stubs cannot type a call that a generated stub makes for
    asyncio.
    """
    while await stream.read() is not _EOF:
        pass


@pytest.mark.req("S128")
@pytest.mark.usefixtures("no_gc")
@pytest.mark.parametrize("door", DOORS)
async def test_an_open_answer_keeps_an_image_and_not_its_text(mesh: GatewayMesh, door: str) -> None:
    """The base64 text of an image is a third longer than the image, and no limit counts this text.
    So the gateway must not keep it.
    """
    path, body = asked(door, stream=True, **({"store": False} if door == "responses" else {}))
    tracemalloc.start()
    try:
        async with (
            httpx.AsyncClient(base_url=mesh.url, timeout=60) as client,
            client.stream("POST", path, json=body) as response,
        ):
            async for _ in response.aiter_lines():
                break
            held = tracemalloc.take_snapshot().traces
    finally:
        tracemalloc.stop()
    assert any(len(DATA) <= trace.size < len(DATA) + 100 for trace in held)
    texts = [t for t in held if t.size >= len(data_uri(DATA)) - 100 and _is_ours(t.traceback)]
    assert not texts


def _is_ours(traceback: tracemalloc.Traceback) -> bool:
    """Whether code of the gateway allocated this memory. The client of this test also keeps its
    request.
    """
    return "/services/gateway/" in traceback[0].filename
