"""The mesh's own client API: pdmesh.v1.InferenceService, with health and reflection.

A call is one request of a client, with one or more choices. Calls are handled as over HTTP. A
method that generates text makes a CallSpec, opens a call, and sends the answer: as pieces, which
are called deltas, or as a whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

import structlog
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection

from pdmesh.errors import MeshError
from pdmesh.net.addresses import join
from pdmesh.net.grpc import rpc
from pdmesh.net.grpc.slow_senders import READ_AHEAD, Incoming, IncomingGuard
from pdmesh.service_process import StartupError
from pdmesh.services.gateway.access.access_control import AccessControl, Permit, charged
from pdmesh.services.gateway.grpc.answers import (
    ChatParts,
    GenerateParts,
    chat_response,
    generate_response,
)
from pdmesh.services.gateway.grpc.calls import chat_spec, detokenized, generate_spec, tokenized
from pdmesh.services.gateway.grpc.health import HealthServicer
from pdmesh.services.gateway.request.deltas import AnswerStream, whole_text
from pdmesh.services.gateway.request.frontend import Call, Frontend, new_request_id
from pdmesh.services.gateway.request.spec import CallSpec
from pdmesh.services.gateway.slow_clients import SlowClients
from pdmesh.services.gateway.text.choice_text import TextDelta
from pdmesh.v1 import inference_service_pb2 as pb

log = structlog.get_logger(__name__)

Context = Any  # grpc.aio.ServicerContext, which is generic in grpc-stubs but not at run time
SERVICE: Final = "pdmesh.v1.InferenceService"
_HEALTH_SERVICE: Final = health_pb2.DESCRIPTOR.services_by_name["Health"]
_HEALTH: Final = f"/{_HEALTH_SERVICE.full_name}/"
_MAX_STREAMS: Final = 1024  # open at once on one connection
_MAX_METADATA_BYTES: Final = 16384
_MAX_FIELDS: Final = 32_768  # of a request. A list of token ids counts as one field.
Part_co = TypeVar("Part_co", covariant=True)


class _Parts(Protocol[Part_co]):
    """The messages of one stream."""

    def part(self, delta: TextDelta, *, is_end: bool) -> Part_co | None: ...


class InferenceServicer:
    """A stream whose client reads nothing for `write_timeout_s` is cancelled (F28)."""

    def __init__(self, frontend: Frontend, access: AccessControl, write_timeout_s: float) -> None:
        self._frontend = frontend
        self._access = access
        self._writing = SlowClients("grpc", write_timeout_s)

    async def run(self) -> None:
        """Runs until cancelled."""
        await self._writing.run()

    async def Generate(  # noqa: N802
        self, request: pb.GenerateRequest, context: Context
    ) -> pb.GenerateResponse:
        async with self._permit(context) as permit:
            spec = await generate_spec(request, self._frontend, permit.tenant)
            async with self._opened(spec, permit, context, is_streamed=False) as call:
                return generate_response(call, await whole_text(call))

    async def GenerateStream(  # noqa: N802
        self, request: pb.GenerateStreamRequest, context: Context
    ) -> AsyncIterator[pb.GenerateStreamResponse]:
        async with self._permit(context) as permit:
            spec = await generate_spec(request.request, self._frontend, permit.tenant)
            async with self._opened(spec, permit, context, is_streamed=True) as call:
                parts = GenerateParts(call, counts_each=request.continuous_usage)
                async for part in self._streamed(call, parts):
                    yield part

    async def Chat(  # noqa: N802
        self, request: pb.ChatRequest, context: Context
    ) -> pb.ChatResponse:
        async with self._permit(context) as permit:
            spec = await chat_spec(request, self._frontend, permit)
            async with self._opened(spec, permit, context, is_streamed=False) as call:
                return chat_response(call, await whole_text(call))

    async def ChatStream(  # noqa: N802
        self, request: pb.ChatStreamRequest, context: Context
    ) -> AsyncIterator[pb.ChatStreamResponse]:
        async with self._permit(context) as permit:
            spec = await chat_spec(request.request, self._frontend, permit)
            async with self._opened(spec, permit, context, is_streamed=True) as call:
                parts = ChatParts(call, counts_each=request.continuous_usage)
                async for part in self._streamed(call, parts):
                    yield part

    async def ListModels(  # noqa: N802
        self, request: pb.ListModelsRequest, context: Context
    ) -> pb.ListModelsResponse:
        async with self._permit(context) as permit:
            tenant = permit.tenant
        served = self._frontend.shared.fleet.models()
        models = [m for m in served if tenant.may_use(m.name)]
        return pb.ListModelsResponse(
            models=[m.name for m in models],
            infos=[
                pb.ModelInfo(
                    name=m.name,
                    max_model_len=m.max_model_len,
                    parent=m.parent or "",
                    created_at_s=int(time.time() - m.age_s),
                )
                for m in models
            ],
        )

    async def Tokenize(  # noqa: N802
        self, request: pb.TokenizeRequest, context: Context
    ) -> pb.TokenizeResponse:
        async with self._permit(context) as permit:
            tokens, model = await tokenized(request, self._frontend, permit)
            spelt = await model.tokenizer.strings(tokens) if request.return_token_strs else ()
        return pb.TokenizeResponse(
            token_ids=tokens, max_model_len=model.context_length, token_strs=spelt
        )

    async def Detokenize(  # noqa: N802
        self, request: pb.DetokenizeRequest, context: Context
    ) -> pb.DetokenizeResponse:
        async with self._permit(context) as permit:
            return pb.DetokenizeResponse(text=await detokenized(request, self._frontend, permit))

    @contextlib.asynccontextmanager
    async def _permit(self, context: Context) -> AsyncIterator[Permit]:
        """Raises MeshError."""
        self._frontend.check_open()
        permit = await self._access.enter(_metadata(context, "authorization"))
        try:
            yield permit
        finally:
            permit.leave()

    @contextlib.asynccontextmanager
    async def _opened(
        self, spec: CallSpec, permit: Permit, context: Context, *, is_streamed: bool
    ) -> AsyncIterator[Call]:
        """Open a call, and close it in the end. If the client leaves, gRPC cancels this task.

        Raises MeshError.
        """
        is_quiet = not (is_streamed or spec.sampling.ends_by_text)
        traceparent = _metadata(context, "traceparent")
        prepared = await self._frontend.prepare(spec)
        call = await charged(
            permit,
            lambda: self._frontend.open(
                prepared, new_request_id(), permit, traceparent, is_quiet=is_quiet
            ),
        )
        error: MeshError | None = None
        try:
            yield call
        except MeshError as exc:
            error = exc
            raise
        finally:
            self._frontend.close(call, error)

    async def _streamed(self, call: Call, parts: _Parts[Part_co]) -> AsyncIterator[Part_co]:
        """Yield the messages of a stream. `SlowClients` sees how long each write takes."""
        writer = _Writer(asyncio.current_task(), call.request_id)
        self._writing.add(writer)
        stream, has_begun = AnswerStream(call), False
        try:
            while stream.num_open:
                deltas = await stream.news()
                num_left = len(deltas)
                for delta in deltas:
                    num_left -= 1
                    part = parts.part(delta, is_end=not stream.num_open and not num_left)
                    if part is None:
                        continue
                    has_begun = True
                    writer.blocked_since = time.monotonic()
                    yield part
                    writer.blocked_since = math.inf
                if stream.failure is not None:  # all earlier output was sent
                    call.is_void = not has_begun
                    raise stream.failure
        finally:
            stream.close()
            self._writing.remove(writer)


@dataclass(frozen=True, slots=True)
class GrpcBounds:
    """Limits on what clients may send and hold open, and on how slowly they may read and write."""

    max_bytes: int  # of a message
    max_incoming_bytes: int
    max_connections: int
    receive_timeout_s: float
    write_timeout_s: float


class GrpcServer:
    """The server of the inference service, of grpc.health.v1 and of reflection.

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

        async def admit(method: str, context: Context) -> None:
            if not method.startswith(_HEALTH):
                await access.check(_metadata(context, "authorization"))

        # Health checks need no key. They have a separate bound, so that they cannot block the calls
        # of clients that have a key.
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
    """The handler of one stream. `blocked_since` is the time at which its current write began."""

    __slots__ = ("_task", "blocked_since", "request_id")

    def __init__(self, task: asyncio.Task[Any] | None, request_id: str) -> None:
        self.request_id = request_id
        self.blocked_since = math.inf
        self._task = task

    def cut(self) -> None:
        if self._task is not None:
            self._task.cancel()


def _metadata(context: Context, name: str) -> str:
    """The value of a metadata key, or empty if it is absent."""
    pairs: Sequence[tuple[str, str | bytes]] = tuple(context.invocation_metadata() or ())
    for key, value in pairs:
        if key == name and isinstance(value, str):
            return value
    return ""
