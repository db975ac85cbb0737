"""Fuzzes the gRPC parsers of the public API and of instances, and the validation after them.

`feed` raises only if one of these promises is broken. The parser turns bytes into a message or
raises InvalidRequest. The validation turns a message into a request or raises a short MeshError. An
accepted request is within the limits of the API.
"""

from __future__ import annotations

import asyncio
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, Final

from pdmesh.core.instance.admission import Capacity, Work
from pdmesh.core.tenancy.limits import ANYONE
from pdmesh.errors import InvalidRequest, MeshError
from pdmesh.instance.legs import convert
from pdmesh.net.grpc import rpc
from pdmesh.services.gateway.access.access_control import ANYONES_PERMIT
from pdmesh.services.gateway.grpc.calls import chat_spec, generate_spec, tokenized
from pdmesh.services.gateway.openai.schema import MAX_CHOICES
from pdmesh.services.gateway.request.frontend import Frontend
from pdmesh.v1 import inference_service_pb2 as pb
from pdmesh.v1 import instance_service_pb2 as instance_pb
from tests.fakes.gateway_mesh import gateway_mesh
from tests.fuzz import errors

MAX_LEN: Final = 131_072  # above this size, the parser counts a message's fields
_MAX_FIELDS: Final = 32_768
_CAPACITY: Final = Capacity(
    works=frozenset({Work.PREFILL}),
    num_slots=4,
    num_blocks=64,
    block_size=4,
    block_bytes=64,
    max_model_len=256,
    staging_bytes=1 << 20,
    landing_bytes=1 << 20,
    max_retrievals=4,
)
_MAX_TOKENS: Final = 1 << 20  # the context length of the mesh's instances


@cache
def _frontend() -> tuple[asyncio.AbstractEventLoop, Frontend]:
    """A gateway with its own tokenizer and fake instances, which lives as long as the process."""
    loop = asyncio.new_event_loop()
    mesh = gateway_mesh(Path(tempfile.mkdtemp()))
    running = loop.run_until_complete(mesh.__aenter__())
    _kept.append(mesh)
    return loop, running.gateway.frontend


_kept: list[Any] = []  # references, because a mesh that is garbage-collected would end


def close() -> None:
    """End everything that `feed` started, so that a test can continue."""
    while _kept:
        loop, _ = _frontend()
        loop.run_until_complete(_kept.pop().__aexit__(None, None, None))
        loop.close()
    _frontend.cache_clear()


def feed(data: bytes) -> None:
    """Feed one input. Its first byte selects the message type."""
    if not data:
        return
    try:
        _KINDS[data[0] % len(_KINDS)](data[1:])
    except MeshError as exc:
        errors.check(exc)


def _parsed(message: Any, data: bytes) -> Any:
    try:
        return rpc._parser(message.DESCRIPTOR, _MAX_FIELDS)(data)
    except InvalidRequest as exc:
        text = f"not a valid {message.DESCRIPTOR.full_name}"
        is_short = exc.message == text or exc.message.endswith(f"more than {_MAX_FIELDS} fields")
        assert is_short, "an error quotes the parser's own message"
        raise


def _generate(data: bytes) -> None:
    request = _parsed(pb.GenerateRequest, data)
    loop, frontend = _frontend()
    _check(loop.run_until_complete(generate_spec(request, frontend, ANYONE)))


def _chat(data: bytes) -> None:
    request = _parsed(pb.ChatRequest, data)
    loop, frontend = _frontend()
    _check(loop.run_until_complete(chat_spec(request, frontend, ANYONES_PERMIT)))


def _tokenize(data: bytes) -> None:
    request = _parsed(pb.TokenizeRequest, data)
    loop, frontend = _frontend()
    tokens, _ = loop.run_until_complete(tokenized(request, frontend, ANYONES_PERMIT))
    assert len(tokens) <= _MAX_TOKENS


def _check(spec: Any) -> None:
    assert spec.model == "tiny"
    assert 1 <= spec.n <= MAX_CHOICES
    assert all(len(prompt) <= _MAX_TOKENS for prompt in spec.prompts)
    sampling = spec.sampling
    assert sampling.max_tokens is None or sampling.max_tokens >= 1
    assert 0 <= sampling.temperature <= 2
    assert 0 < sampling.top_p <= 1
    assert len(sampling.stop) <= 16


def _session(data: bytes) -> None:
    """Parse the commands of a session as an instance does."""
    request = _parsed(instance_pb.SessionRequest, data)
    for command in request.commands:
        kind = command.WhichOneof("command")
        if kind not in ("prefill", "start"):
            continue
        m = getattr(command, kind)
        try:
            parsed = convert.parse(m, _CAPACITY)
        except InvalidRequest as exc:
            errors.check(exc)
            continue
        assert len(parsed.prompt) * 4 == len(m.prompt_token_ids)
        assert len(parsed.block_hashes) in (0, len(parsed.prompt) // _CAPACITY.block_size)
        if kind == "start":
            convert.ticket_from_proto(m.ticket)


_KINDS: Final = (_generate, _chat, _session, _tokenize)


def honest() -> bytes:
    text = pb.GenerateRequest(model="tiny", text="a b " * (MAX_LEN // 4 - 16))
    return b"\0" + text.SerializeToString()


def seeds() -> dict[str, bytes]:
    params = pb.GenerationParams(max_tokens=3, temperature=0.5, top_p=0.9, seed=7, stop=["a"])
    generate = pb.GenerateRequest(
        model="tiny", text="abc", params=params, n=2, scenario="s", chat_id="c", cache_salt="x"
    )
    ids = pb.GenerateRequest(model="tiny", token_ids=pb.TokenIds(ids=[1, 2, 3]))
    chat = pb.ChatRequest(
        model="tiny", messages=[pb.ChatMessage(role="user", content="hello")], params=params
    )
    tool = pb.Tool(function=pb.FunctionDefinition(name="f", parameters='{"type": "object"}'))
    call = pb.ToolCall(id="c", function=pb.FunctionCall(name="f", arguments="{}"))
    tools = pb.ChatRequest(
        messages=[
            pb.ChatMessage(role="system", content_parts=[pb.ContentPart(text="p")]),
            pb.ChatMessage(role="assistant", reasoning="hm", tool_calls=[call]),
            pb.ChatMessage(role="tool", content="x", tool_call_id="c"),
        ],
        tools=[tool],
        tool_choice=pb.ToolChoice(mode=pb.TOOL_CHOICE_MODE_NONE),
        reasoning_effort=pb.REASONING_EFFORT_LOW,
        chat_template_kwargs='{"a": 1}',
    )
    tokenize = pb.TokenizeRequest(text="abc", return_token_strs=True)
    prefill = instance_pb.Prefill(key=1, prompt_token_ids=b"\1\0\0\0" * 4, block_hashes=[bytes(16)])
    start = instance_pb.Start(key=2, prompt_token_ids=b"\1\0\0\0" * 4)
    start.ticket.ticket_id = "t"
    session = instance_pb.SessionRequest(
        commands=[
            instance_pb.Command(hello=instance_pb.Hello()),
            instance_pb.Command(prefill=prefill),
            instance_pb.Command(start=start),
            instance_pb.Command(abort=instance_pb.Abort(key=1)),
        ]
    )
    messages: list[tuple[int, Any]] = [
        (0, generate),
        (0, ids),
        (1, chat),
        (2, session),
        (1, tools),
        (3, tokenize),
    ]
    found = {
        f"message-{i:02}": bytes([kind]) + m.SerializeToString()
        for i, (kind, m) in enumerate(messages)
    }
    found["fields"] = b"\1" + b"\x12\x00" * 40
    found["groups"] = b"\0" + b"\x0b" * 20
    return found
