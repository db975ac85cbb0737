"""Sends one request to the gateway over HTTP or gRPC, whole or streamed, and returns its answer.

The `Answer` has the same form in all four cases, so tests can compare them. `legs` returns the
requests that the fake instances received from the gateway.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from typing import Any

import grpc
import httpx

from pdmesh.v1 import inference_service_pb2 as pb
from pdmesh.v1.inference_service_pb2_grpc import InferenceServiceStub
from pdmesh.v1.instance_service_pb2 import Prefill, Start
from tests.fakes.gateway_mesh import GatewayMesh

# The type is Any because the values are parsed JSON, or messages of two gRPC methods.
Json = Any


@dataclass
class Said:
    """One choice of an answer, assembled from the pieces of a stream or from a whole answer."""

    text: str = ""
    reasoning: str = ""
    # the name and the arguments of each tool call
    calls: list[list[str]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] = field(default_factory=list)
    prompt_token_ids: list[int] = field(default_factory=list)
    num_logprobs: int = 0
    ids: set[str] = field(default_factory=set, compare=False)  # random IDs of the tool calls

    def call(self, index: int, call_id: str, name: str, arguments: str) -> None:
        """Add a piece of a tool call. Only the first piece of a call has an ID and a name."""
        if index == len(self.calls):
            assert call_id
            assert name
            self.calls.append([name, ""])
            self.ids.add(call_id)
        else:
            assert (call_id, name) == ("", "")
        self.calls[index][1] += arguments


@dataclass
class Answer:
    choices: dict[int, Said] = field(default_factory=dict)
    usage: tuple[int, ...] = ()  # tokens of the prompt, the answer and its reasoning
    num_parts: int = field(default=0, compare=False)

    def of(self, index: int) -> Said:
        return self.choices.setdefault(index, Said())


def legs(mesh: GatewayMesh) -> list[tuple[Any, ...]]:
    """The requests to prefills and decodes since the last call of this function.

    The values that differ from run to run, such as keys of requests, are left out.
    """
    told: list[tuple[Any, ...]] = []
    for instance in mesh.instances.values():
        legs: list[Prefill | Start] = [*instance.prefills, *instance.starts]
        for leg in legs:
            sampling = leg.sampling.SerializeToString(deterministic=True)
            told.append((leg.prompt_token_ids, sampling, leg.cache_salt, leg.model))
        instance.prefills.clear()
        instance.starts.clear()
    return sorted(told)


async def over_http(mesh: GatewayMesh, body: Json, *, is_streamed: bool) -> Answer:
    path = "chat/completions" if "messages" in body else "completions"
    if is_streamed:
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    async with httpx.AsyncClient(timeout=600) as http:  # the first request starts vLLM's parsers
        answer = await http.post(f"{mesh.url}/v1/{path}", json={"model": "tiny", **body})
    assert answer.status_code == 200, answer.text
    if not is_streamed:
        return _of_http([answer.json()])
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert events.pop() == "[DONE]"
    return _of_http(map(json.loads, events))


def _of_http(chunks: Iterable[Json]) -> Answer:
    answer = Answer()
    for chunk in chunks:
        answer.num_parts += 1
        for choice in chunk["choices"]:
            said = answer.of(choice["index"])
            parts = choice.get("message") or choice.get("delta") or {}
            said.text += choice.get("text") or parts.get("content") or ""
            said.reasoning += parts.get("reasoning_content") or ""
            for at, call in enumerate(parts.get("tool_calls") or ()):
                function = call["function"]
                said.call(
                    call.get("index", at),
                    call.get("id") or "",
                    function.get("name") or "",
                    function["arguments"],
                )
            said.finish_reason = choice["finish_reason"] or said.finish_reason
            said.stop_reason = choice.get("stop_reason") or said.stop_reason
            said.token_ids += choice.get("token_ids") or ()
            said.prompt_token_ids += choice.get("prompt_token_ids") or ()
            told = choice.get("logprobs") or {}
            said.num_logprobs += len(told.get("content") or told.get("tokens") or ())
        if chunk.get("prompt_token_ids"):
            for said in answer.choices.values():
                said.prompt_token_ids = said.prompt_token_ids or chunk["prompt_token_ids"]
        if usage := chunk.get("usage"):
            details = usage.get("completion_tokens_details") or {}
            reasoning = details.get("reasoning_tokens", 0)
            answer.usage = (usage["prompt_tokens"], usage["completion_tokens"], reasoning)
    return answer


async def over_grpc(
    mesh: GatewayMesh, request: pb.ChatRequest | pb.GenerateRequest, *, is_streamed: bool
) -> Answer:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{mesh.gateway.grpc.port}") as channel:
        stub = InferenceServiceStub(channel)
        if is_streamed:
            return await of_stream(_stream(stub, request))
        if isinstance(request, pb.ChatRequest):
            return _of_whole(await stub.Chat(request))
        return _of_whole(await stub.Generate(request))


def _stream(stub: Any, request: pb.ChatRequest | pb.GenerateRequest) -> AsyncIterator[Json]:
    stream: AsyncIterator[Json] = (
        stub.ChatStream(pb.ChatStreamRequest(request=request))
        if isinstance(request, pb.ChatRequest)
        else stub.GenerateStream(pb.GenerateStreamRequest(request=request))
    )
    return stream


async def of_stream(parts: AsyncIterator[Json]) -> Answer:
    answer = Answer()
    async for part in parts:
        assert not answer.usage, "usage comes last"
        answer.num_parts += 1
        said = answer.of(part.index)
        assert said.finish_reason is None, "nothing comes after a choice's end"
        _add(said, part)
        said.text += part.content if isinstance(part, pb.ChatStreamResponse) else part.text
        if isinstance(part, pb.ChatStreamResponse):
            said.reasoning += part.reasoning
            for call in part.tool_calls:
                said.call(call.index, call.id, call.function.name, call.function.arguments)
        _use(answer, part)
    return answer


def _of_whole(whole: pb.ChatResponse | pb.GenerateResponse) -> Answer:
    answer = Answer(num_parts=1)
    first = answer.of(0)
    _add(first, whole)
    if isinstance(whole, pb.ChatResponse):
        assert whole.message.role == "assistant"
        _add_message(first, whole.message.content, whole.message)
    else:
        first.text = whole.text
    for choice in whole.other_choices:
        said = answer.of(choice.index)
        _add(said, choice)
        _add_message(said, choice.text, choice)
        if isinstance(whole, pb.ChatResponse):  # all choices of a chat have one prompt
            said.prompt_token_ids = first.prompt_token_ids
    _use(answer, whole)
    return answer


def _add_message(said: Said, text: str, message: pb.ChatMessage | pb.Choice) -> None:
    said.text, said.reasoning = text, message.reasoning
    for index, call in enumerate(message.tool_calls):
        said.call(index, call.id, call.function.name, call.function.arguments)


def _add(said: Said, part: Json) -> None:
    said.token_ids += part.token_ids
    said.prompt_token_ids += part.prompt_token_ids
    said.num_logprobs += len(part.logprobs)
    if part.finish_reason:
        name = pb.DESCRIPTOR.pool.FindEnumTypeByName("pdmesh.v1.FinishReason")
        number = name.values_by_number[part.finish_reason]
        said.finish_reason = number.name.removeprefix("FINISH_REASON_").lower()
    if kind := part.stop_reason.WhichOneof("reason"):
        said.stop_reason = getattr(part.stop_reason, kind)


def _use(answer: Answer, part: Json) -> None:
    if part.HasField("usage"):
        told = part.usage
        answer.usage = (
            told.num_prompt_tokens,
            told.num_completion_tokens,
            told.num_reasoning_tokens,
        )
