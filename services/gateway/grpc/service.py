"""The mesh's own client API: pdmesh.v1.InferenceService, with health and reflection.

Calls take the same path as over HTTP: each method makes a CallSpec and returns one call's deltas.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import structlog
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection

from pdmesh.errors import MeshError
from pdmesh.lifecycle import StartupError
from pdmesh.net.grpc import rpc
from pdmesh.net.grpc.incoming import READ_AHEAD, Incoming, IncomingGuard
from pdmesh.net.loopback import join
from pdmesh.services.gateway.access.access_control import AccessControl, Permit, charged
from pdmesh.services.gateway.grpc.calls import chat_spec, generate_spec
from pdmesh.services.gateway.grpc.health import HealthServicer
from pdmesh.services.gateway.request.frontend import Call, Frontend, new_request_id
from pdmesh.services.gateway.request.spec import CallSpec
from pdmesh.services.gateway.text.choice_text import TextDelta
from pdmesh.v1 import inference_service_pb2 as pb
from pdmesh.v1.common_pb2 import (
    FINISH_REASON_LENGTH,
    FINISH_REASON_REPETITION,
    FINISH_REASON_STOP,
    FinishReason,
    StopReason,
    Usage,
)

log = structlog.get_logger(__name__)

Context = Any  # grpc.aio.ServicerContext, generic in grpc-stubs and plain at run time
SERVICE: Final = "pdmesh.v1.InferenceService"
_SWEEP_S: Final = 0.5
_HEALTH_SERVICE: Final = health_pb2.DESCRIPTOR.services_by_name["Health"]
_HEALTH: Final = f"/{_HEALTH_SERVICE.full_name}/"
_MAX_STREAMS: Final = 1024  # at once on one connection
_MAX_METADATA_BYTES: Final = 16384
_MAX_FIELDS: Final = 32_768  # of a request; a list of token ids is one
_REASONS: Final[dict[str | None, FinishReason.ValueType]] = {
    "stop": FINISH_REASON_STOP,
    "length": FINISH_REASON_LENGTH,
    "repetition": FINISH_REASON_REPETITION,
}


class InferenceServicer:
    """As over HTTP, a client that reads nothing for `write_timeout_s` is disconnected (F28)."""

    def __init__(self, frontend: Frontend, access: AccessControl, write_timeout_s: float) -> None:
        self._frontend = frontend
        self._access = access
        self._write_timeout_s = write_timeout_s
        self._writing: dict[_Writer, None] = {}

    async def run(self) -> None:
        """Disconnect clients that have not read for too long."""
        while True:
            await asyncio.sleep(_SWEEP_S)
            limit = time.monotonic() - self._write_timeout_s
            for writer in [w for w in self._writing if w.blocked_since < limit]:
                log.info("grpc.client_not_reading", request_id=writer.request_id)
                writer.cut()

    async def Generate(  # noqa: N802
        self, request: pb.GenerateRequest, context: Context
    ) -> pb.GenerateResponse:
        async with self._permit(context) as permit:
            spec = await generate_spec(request, self._frontend, permit.tenant)
            request_id, choices, usage = await self._whole(spec, permit, context)
        first = choices[0]
        return pb.GenerateResponse(
            request_id=request_id,
            model=spec.model,
            text=first.text,
            token_ids=first.token_ids,
            finish_reason=first.finish_reason,
            stop_reason=_of(first, "stop_reason"),
            logprobs=first.logprobs,
            prompt_logprobs=_of(first, "prompt_logprobs"),
            usage=usage,
            other_choices=choices[1:],
        )

    async def GenerateStream(  # noqa: N802
        self, request: pb.GenerateStreamRequest, context: Context
    ) -> AsyncIterator[pb.GenerateStreamResponse]:
        async with self._permit(context) as permit:
            spec = await generate_spec(request.request, self._frontend, permit.tenant)
            async for call, delta, is_end in self._streamed(spec, permit, context):
                response = pb.GenerateStreamResponse(
                    request_id=call.request_id,
                    index=delta.index,
                    text=delta.text,
                    token_ids=delta.token_ids,
                    logprobs=delta.logprobs,
                    prompt_logprobs=delta.prompt_logprobs,
                    stop_reason=_stop_reason(delta),
                )
                if delta.is_last:
                    response.finish_reason = _REASONS[delta.finish_reason]
                if is_end:
                    response.usage.CopyFrom(_usage(call))
                yield response

    async def Chat(  # noqa: N802
        self, request: pb.ChatRequest, context: Context
    ) -> pb.ChatResponse:
        async with self._permit(context) as permit:
            spec = await chat_spec(request, self._frontend, permit.tenant)
            request_id, choices, usage = await self._whole(spec, permit, context)
        first = choices[0]
        return pb.ChatResponse(
            request_id=request_id,
            model=spec.model,
            message=pb.ChatMessage(role="assistant", content=first.text),
            finish_reason=first.finish_reason,
            stop_reason=_of(first, "stop_reason"),
            logprobs=first.logprobs,
            prompt_logprobs=_of(first, "prompt_logprobs"),
            usage=usage,
            other_choices=choices[1:],
        )

    async def ChatStream(  # noqa: N802
        self, request: pb.ChatStreamRequest, context: Context
    ) -> AsyncIterator[pb.ChatStreamResponse]:
        async with self._permit(context) as permit:
            spec = await chat_spec(request.request, self._frontend, permit.tenant)
            async for call, delta, is_end in self._streamed(spec, permit, context):
                response = pb.ChatStreamResponse(
                    request_id=call.request_id,
                    index=delta.index,
                    content=delta.text,
                    logprobs=delta.logprobs,
                    prompt_logprobs=delta.prompt_logprobs,
                    stop_reason=_stop_reason(delta),
                )
                if delta.is_last:
                    response.finish_reason = _REASONS[delta.finish_reason]
                if is_end:
                    response.usage.CopyFrom(_usage(call))
                yield response

    async def ListModels(  # noqa: N802
        self, request: pb.ListModelsRequest, context: Context
    ) -> pb.ListModelsResponse:
        async with self._permit(context) as permit:
            allowed = permit.tenant.models
        served = self._frontend.shared.fleet.models()
        models = [m for m in served if not allowed or m.name in allowed]
        return pb.ListModelsResponse(
            models=[m.name for m in models],
            infos=[pb.ModelInfo(name=m.name, max_model_len=m.max_model_len) for m in models],
        )

    @contextlib.asynccontextmanager
    async def _permit(self, context: Context) -> AsyncIterator[Permit]:
        """Raises MeshError."""
        self._frontend.check_open()
        permit = await self._access.enter(_metadata(context, "authorization"))
        try:
            yield permit
        finally:
            permit.leave()

    async def _whole(
        self, spec: CallSpec, permit: Permit, context: Context
    ) -> tuple[str, list[pb.Choice], Usage]:
        num_choices = spec.n * len(spec.prompts)
        choices = [pb.Choice(index=i) for i in range(num_choices)]
        texts: list[list[str]] = [[] for _ in range(num_choices)]
        request_id, usage = "", Usage()
        async for call, delta, is_end in self._deltas(spec, permit, context, is_streamed=False):
            texts[delta.index].append(delta.text)
            choice = choices[delta.index]
            choice.token_ids.extend(delta.token_ids)
            choice.logprobs.extend(delta.logprobs)
            if delta.prompt_logprobs is not None:
                choice.prompt_logprobs.CopyFrom(delta.prompt_logprobs)
            if delta.is_last:
                choice.finish_reason = _REASONS[delta.finish_reason]
                if (reason := _stop_reason(delta)) is not None:
                    choice.stop_reason.CopyFrom(reason)
            if is_end:
                request_id, usage = call.request_id, _usage(call)
        for choice, parts in zip(choices, texts, strict=True):
            choice.text = "".join(parts)
        return request_id, choices, usage

    async def _streamed(
        self, spec: CallSpec, permit: Permit, context: Context
    ) -> AsyncIterator[tuple[Call, TextDelta, bool]]:
        """The deltas of `_deltas`, with a watch on how long each takes to be written."""
        writer = _Writer(asyncio.current_task())
        self._writing[writer] = None
        try:
            async for call, delta, is_end in self._deltas(spec, permit, context, is_streamed=True):
                writer.request_id = call.request_id
                writer.blocked_since = time.monotonic()
                yield call, delta, is_end
                writer.blocked_since = math.inf
        finally:
            del self._writing[writer]

    async def _deltas(
        self, spec: CallSpec, permit: Permit, context: Context, *, is_streamed: bool
    ) -> AsyncIterator[tuple[Call, TextDelta, bool]]:
        """The call's deltas, each with whether it is the last one.

        If the client disconnects, this task is cancelled, which frees the call.
        """
        traceparent = _metadata(context, "traceparent")
        call = await charged(
            permit, lambda: self._frontend.open(spec, new_request_id(), permit, traceparent)
        )
        num_open, has_begun = len(call.generations), False
        try:
            while num_open:
                await call.changed()
                failed: MeshError | None = None
                for taken in call.take():
                    delta, failed = taken, failed or taken.error
                    if taken.error is not None:  # the client first gets the text before the error
                        delta = replace(taken, is_last=False, error=None)
                    num_open -= delta.is_last
                    if delta.is_last or delta.text or delta.token_ids:
                        has_begun = True
                        yield call, delta, not num_open
                if failed is not None:
                    call.is_void = not (is_streamed and has_begun)
                    raise failed
        finally:
            self._frontend.close(call)


@dataclass(frozen=True, slots=True)
class GrpcBounds:
    """What clients may send and hold at most, and how slowly they may read and write."""

    max_bytes: int  # of a message
    max_incoming_bytes: int
    max_connections: int
    receive_timeout_s: float
    write_timeout_s: float


class GrpcServer:
    """The server of the service, of grpc.health.v1 and of reflection.

    The health service answers SERVING while the gateway is ready.
    """

    def __init__(
        self,
        frontend: Frontend,
        access: AccessControl,
        host: str,
        port: int,
        bounds: GrpcBounds,
        *,
        reuse_port: bool,
    ) -> None:
        options = (
            *READ_AHEAD,
            ("grpc.max_concurrent_streams", _MAX_STREAMS),
            ("grpc.max_metadata_size", _MAX_METADATA_BYTES),
            ("grpc.absolute_max_metadata_size", _MAX_METADATA_BYTES),
        )

        def admit(method: str, context: Context) -> None:
            if not method.startswith(_HEALTH):
                access.check(_metadata(context, "authorization"))

        # Clients without a key get a bound of their own, apart from clients that have one.
        num_messages = max(2, bounds.max_incoming_bytes // bounds.max_bytes)
        num_keyless = max(1, num_messages // 4)
        of_all = Incoming(num_messages - num_keyless, bounds.receive_timeout_s)
        of_keyless = Incoming(num_keyless, bounds.receive_timeout_s)

        def incoming(method: str) -> Incoming:
            return of_keyless if method.startswith(_HEALTH) else of_all

        self._server = rpc.server(
            bounds.max_bytes,
            is_public=True,
            max_connections=bounds.max_connections,
            reuse_port=reuse_port,
            options=options,
            interceptors=[IncomingGuard(incoming, admit, rpc.fail)],
        )
        service = pb.DESCRIPTOR.services_by_name["InferenceService"]
        self._servicer = InferenceServicer(frontend, access, bounds.write_timeout_s)
        rpc.add_service(self._server, service, self._servicer, _MAX_FIELDS)
        self._health = HealthServicer((SERVICE,))
        rpc.add_service(self._server, _HEALTH_SERVICE, self._health, _MAX_FIELDS)
        names = (SERVICE, _HEALTH_SERVICE.full_name, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        try:
            self.port = self._server.add_insecure_port(join(host, port))
        except RuntimeError as exc:
            message = f"cannot listen on {host}:{port}; set PDMESH_GATEWAY_GRPC_PORT"
            raise StartupError(message) from exc

    async def start(self) -> None:
        await self._server.start()

    async def run(self) -> None:
        await self._servicer.run()

    def set_serving(self, is_serving: bool) -> None:
        self._health.set_serving(is_serving)

    async def stop(self, grace_s: float) -> None:
        self._health.close()
        await self._server.stop(grace_s)


class _Writer:
    """The handler of one stream: how to end it, and since when its client has read nothing."""

    __slots__ = ("_task", "blocked_since", "request_id")

    def __init__(self, task: asyncio.Task[Any] | None) -> None:
        self.request_id = ""
        self.blocked_since = math.inf
        self._task = task

    def cut(self) -> None:
        if self._task is not None:
            self._task.cancel()


def _stop_reason(delta: TextDelta) -> StopReason | None:
    if delta.finish_reason == "repetition":
        return None
    match delta.stop_reason:
        case None:
            return None
        case int():
            return StopReason(token_id=delta.stop_reason)
        case str():
            return StopReason(text=delta.stop_reason)


def _of(choice: pb.Choice, field: str) -> Any:
    """The choice's message `field`, or None if it is not set, so that the answer leaves it out."""
    return getattr(choice, field) if choice.HasField(field) else None  # type: ignore[arg-type]


def _usage(call: Call) -> Usage:
    return Usage(
        num_prompt_tokens=call.num_prompt_tokens,
        num_completion_tokens=call.num_completion_tokens,
        num_cached_tokens=call.num_cached_tokens,
    )


def _metadata(context: Context, name: str) -> str:
    """The value of a metadata key; empty if absent."""
    pairs: Sequence[tuple[str, str | bytes]] = tuple(context.invocation_metadata() or ())
    for key, value in pairs:
        if key == name and isinstance(value, str):
            return value
    return ""
