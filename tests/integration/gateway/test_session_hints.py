"""Tests session hints, by which a client announces that its chat session pauses, resumes or ends.
A hint from any API must reach the instances that served the session.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from pdmesh.v1 import inference_service_pb2 as pb
from pdmesh.v1.common_pb2 import (
    SESSION_STATE_DONE,
    SESSION_STATE_PAUSED_FOR_TOOL,
    SESSION_STATE_RESUMED,
)
from pdmesh.v1.inference_service_pb2_grpc import InferenceServiceStub
from pdmesh.v1.instance_service_pb2 import SessionHint
from tests.fakes.gateway_mesh import GatewayMesh, gateway_mesh
from tests.support.waiting import until

PAUSED = {"session": {"id": "s-1", "state": "paused_for_tool"}}
MESSAGES = [{"role": "user", "content": "word " * 40}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 4},
    "/v1/completions": {"prompt": [40] * 40, "max_tokens": 4},
    "/v1/responses": {"input": "word " * 40, "max_output_tokens": 16},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 4},
}


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[GatewayMesh]:
    async with gateway_mesh(tmp_path, session_hold_s=7.0) as found:
        for instance in found.instances.values():
            instance.takes_session_hints = True
            found.register(instance.record())
        await until(lambda: all(
            (r := found.gateway.fleet.instance(i)) is not None and r.takes_session_hints
            for i in found.instances
        ))  # fmt: skip
        yield found


async def post(mesh: GatewayMesh, path: str, **fields: Any) -> httpx.Response:
    async with httpx.AsyncClient(timeout=60.0) as client:
        body = {"model": "default", **BODIES[path], **fields}
        return await client.post(mesh.url + path, json=body)


async def hints(mesh: GatewayMesh, count: int = 1) -> list[SessionHint]:
    """The session hints that the prefill received, once prefill and decode have `count` of them.
    Checks that both received the same.
    """
    all_of = [i.session_hints for i in mesh.instances.values()]
    await until(lambda: all(len(got) >= count for got in all_of))
    assert all_of[0] == all_of[1]
    return all_of[0]


@pytest.mark.req("S108")
@pytest.mark.parametrize("path", BODIES)
async def test_over_http(mesh: GatewayMesh, path: str) -> None:
    answer = await post(mesh, path, **PAUSED)
    assert answer.status_code == 200, answer.text
    (hint,) = await hints(mesh)
    assert (hint.state, hint.hold_ms) == (SESSION_STATE_PAUSED_FOR_TOOL, 7000)
    assert len(hint.block_hashes) >= 2
    assert "s-1" not in hint.session, "instances see a digest"


@pytest.mark.req("S108")
async def test_over_grpc_and_in_the_same_session(mesh: GatewayMesh) -> None:
    assert (await post(mesh, "/v1/completions", **PAUSED)).status_code == 200
    async with grpc.aio.insecure_channel(f"127.0.0.1:{mesh.gateway.grpc.port}") as channel:
        stub: Any = InferenceServiceStub(channel)
        params = pb.GenerationParams(max_tokens=4)
        tokens = pb.TokenIds(ids=[40] * 40)
        resumed = pb.Session(id="s-1", state=SESSION_STATE_RESUMED)
        await stub.Generate(pb.GenerateRequest(token_ids=tokens, params=params, session=resumed))
        done = pb.Session(id="s-1", state=SESSION_STATE_DONE)
        said = [pb.ChatMessage(role="user", content="word " * 40)]
        await stub.Chat(pb.ChatRequest(messages=said, params=params, session=done))
        stateless = pb.ChatRequest(messages=said, params=params, session=pb.Session(id="s-1"))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Chat(stateless)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "session.state" in (refused.value.details() or "")
    found = await hints(mesh, 3)
    assert [h.state for h in found] == [
        SESSION_STATE_PAUSED_FOR_TOOL, SESSION_STATE_RESUMED, SESSION_STATE_DONE,
    ]  # fmt: skip
    assert len({h.session for h in found}) == 1


@pytest.mark.req("S108")
async def test_several_choices_are_one_hint(mesh: GatewayMesh) -> None:
    assert (await post(mesh, "/v1/completions", n=3, **PAUSED)).status_code == 200
    done = {"session": {"id": "s-1", "state": "done"}}
    assert (await post(mesh, "/v1/completions", **done)).status_code == 200
    paused, ended = await hints(mesh, 2)
    assert (paused.state, ended.state) == (SESSION_STATE_PAUSED_FOR_TOOL, SESSION_STATE_DONE)
    assert len(paused.block_hashes) >= 2
    assert len(set(paused.block_hashes)) == len(paused.block_hashes)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"session": {"id": "", "state": "done"}}, "session.id"),
        ({"session": {"id": "x" * 257, "state": "done"}}, "session.id"),
        ({"session": {"id": "a", "state": "done"}, "chat_id": "b"}, "session.id"),
        ({"session": {"id": "a", "state": "gone"}}, "session.state"),
        ({"session": {"id": "a"}}, "session"),
    ],
)
async def test_an_error_names_its_field(
    mesh: GatewayMesh, path: str, fields: dict[str, Any], field: str
) -> None:
    answer = await post(mesh, path, **fields)
    assert answer.status_code == 400, answer.text
    assert field in answer.text


async def test_an_instance_without_a_host_pool_is_told_nothing(mesh: GatewayMesh) -> None:
    decode = next(i for i in mesh.instances.values() if i.instance_id.startswith("decode"))
    decode.takes_session_hints = False
    mesh.register(decode.record())
    await until(lambda: not mesh.gateway.fleet.instance(decode.instance_id).takes_session_hints)  # type: ignore[union-attr]
    assert (await post(mesh, "/v1/completions", **PAUSED)).status_code == 200
    prefill = next(i for i in mesh.instances.values() if i is not decode)
    await until(lambda: bool(prefill.session_hints))
    assert decode.session_hints == []
