"""The mesh's own API for clients: pdmesh.v1.InferenceService, with health and reflection.

The same path as HTTP: each method turns its request into a CallSpec and gives out the deltas of one call.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from pdmesh.core.block_hash import token_array
from pdmesh.errors import InvalidRequest
from pdmesh.lifecycle import StartupError
from pdmesh.net import rpc
from pdmesh.v1 import inference_service_pb2 as pb
from pdmesh.v1.common_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_STOP, FinishReason, Usage
from services.gateway.frontend import Call, Frontend, new_request_id
from services.gateway.generation import Delta
from services.gateway.openai_calls import chat_tokens, check_logprobs
from services.gateway.openai_schema import check_sampling, stops_of
from services.gateway.spec import CallSpec, SamplingSpec

Context = Any  # grpc.aio.ServicerContext, generic in grpc-stubs and plain at run time
SERVICE: Final = "pdmesh.v1.InferenceService"
_ROLES: Final = frozenset({"system", "user", "assistant"})
_MAX_MESSAGES: Final = 2048
_REASONS: Final[dict[str | None, FinishReason.ValueType]] = {
    "stop": FINISH_REASON_STOP,
    "length": FINISH_REASON_LENGTH,
}


class InferenceServicer:
    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend

    async def Generate(  # noqa: N802
        self, request: pb.GenerateRequest, context: Context
    ) -> pb.GenerateResponse:
        spec = await self._generate_spec(request)
        response = pb.GenerateResponse(model=spec.model)
        text: list[str] = []
        async for call, delta in self._deltas(spec, context):
            text.append(delta.text)
            response.token_ids.extend(delta.token_ids)
            response.logprobs.extend(delta.logprobs)
            if delta.is_last:
                response.request_id = call.request_id
                response.finish_reason = _REASONS[delta.finish_reason]
                response.usage.CopyFrom(_usage(call))
        response.text = "".join(text)
        return response

    async def GenerateStream(  # noqa: N802
        self, request: pb.GenerateStreamRequest, context: Context
    ) -> AsyncIterator[pb.GenerateStreamResponse]:
        async for call, delta in self._deltas(await self._generate_spec(request.request), context):
            response = pb.GenerateStreamResponse(
                request_id=call.request_id,
                text=delta.text,
                token_ids=delta.token_ids,
                logprobs=delta.logprobs,
            )
            if delta.is_last:
                response.finish_reason = _REASONS[delta.finish_reason]
                response.usage.CopyFrom(_usage(call))
            yield response

    async def Chat(  # noqa: N802
        self, request: pb.ChatRequest, context: Context
    ) -> pb.ChatResponse:
        spec = await self._chat_spec(request)
        response = pb.ChatResponse(model=spec.model)
        text: list[str] = []
        async for call, delta in self._deltas(spec, context):
            text.append(delta.text)
            response.logprobs.extend(delta.logprobs)
            if delta.is_last:
                response.request_id = call.request_id
                response.finish_reason = _REASONS[delta.finish_reason]
                response.usage.CopyFrom(_usage(call))
        response.message.CopyFrom(pb.ChatMessage(role="assistant", content="".join(text)))
        return response

    async def ChatStream(  # noqa: N802
        self, request: pb.ChatStreamRequest, context: Context
    ) -> AsyncIterator[pb.ChatStreamResponse]:
        async for call, delta in self._deltas(await self._chat_spec(request.request), context):
            response = pb.ChatStreamResponse(
                request_id=call.request_id, content=delta.text, logprobs=delta.logprobs
            )
            if delta.is_last:
                response.finish_reason = _REASONS[delta.finish_reason]
                response.usage.CopyFrom(_usage(call))
            yield response

    async def ListModels(  # noqa: N802
        self, request: pb.ListModelsRequest, context: Context
    ) -> pb.ListModelsResponse:
        return pb.ListModelsResponse(models=self._frontend.shared.fleet.models())

    async def _deltas(self, spec: CallSpec, context: Context) -> AsyncIterator[tuple[Call, Delta]]:
        """The call's deltas up to its last. A client that goes away cancels us, and that frees the call."""
        call = self._frontend.open(spec, new_request_id(), _traceparent(context))
        try:
            while True:
                await call.changed()
                for delta in call.take():
                    if delta.error is not None:
                        raise delta.error
                    yield call, delta
                    if delta.is_last:
                        return
        finally:
            self._frontend.close(call)

    async def _generate_spec(self, request: pb.GenerateRequest) -> CallSpec:
        model = self._frontend.model_name(request.model)
        sampling = self._sampling(request.params, model)
        tokenizer = self._frontend.shared.tokenizer
        match request.WhichOneof("prompt"):
            case "text":
                tokens = await tokenizer.encode(request.text, add_special_tokens=True)
            case "token_ids":
                if any(i >= tokenizer.vocab_size for i in request.token_ids.ids):
                    message = f"token ids are 0 to {tokenizer.vocab_size - 1}"
                    raise InvalidRequest(message, field="token_ids")
                tokens = token_array(request.token_ids.ids)
            case _:
                raise InvalidRequest("either text or token_ids is needed", field="prompt")
        return CallSpec(
            operation="text_completion",
            model=model,
            prompts=(tokens,),
            sampling=sampling,
            scenario=request.scenario,
            chat_id=request.chat_id,
        )

    async def _chat_spec(self, request: pb.ChatRequest) -> CallSpec:
        model = self._frontend.model_name(request.model)
        sampling = self._sampling(request.params, model)
        if not 0 < len(request.messages) <= _MAX_MESSAGES:
            raise InvalidRequest(f"1 to {_MAX_MESSAGES} messages are needed", field="messages")
        for index, message in enumerate(request.messages):
            if message.role not in _ROLES:
                field = f"messages[{index}].role"
                raise InvalidRequest("a role is system, user or assistant", field=field)
        messages = [{"role": m.role, "content": m.content} for m in request.messages]
        return CallSpec(
            operation="chat",
            model=model,
            prompts=(await chat_tokens(messages, self._frontend),),
            sampling=sampling,
            scenario=request.scenario,
            chat_id=request.chat_id,
            field_of_prompt="messages",
        )

    def _sampling(self, params: pb.GenerationParams, model: str) -> SamplingSpec:
        max_tokens = params.max_tokens if params.HasField("max_tokens") else None
        temperature = params.temperature if params.HasField("temperature") else None
        top_p = params.top_p if params.HasField("top_p") else None
        num_logprobs = params.num_logprobs if params.HasField("num_logprobs") else None
        check_sampling(max_tokens=max_tokens, temperature=temperature, top_p=top_p)
        if num_logprobs is not None and num_logprobs > 20:
            raise InvalidRequest("num_logprobs is at most 20", field="num_logprobs")
        check_logprobs(self._frontend, model, num_logprobs)
        return SamplingSpec(
            max_tokens=max_tokens,
            temperature=1.0 if temperature is None else temperature,
            top_p=1.0 if top_p is None else top_p,
            seed=params.seed if params.HasField("seed") else None,
            stop=stops_of(list(params.stop)),
            ignore_eos=params.ignore_eos,
            num_logprobs=num_logprobs,
        )


class GrpcServer:
    """The service with grpc.health.v1 and reflection. Health answers SERVING while the gateway is ready."""

    def __init__(
        self, frontend: Frontend, host: str, port: int, *, max_bytes: int, reuse_port: bool
    ) -> None:
        self._server = rpc.server(max_bytes, reuse_port=reuse_port)
        service = pb.DESCRIPTOR.services_by_name["InferenceService"]
        rpc.add_service(self._server, service, InferenceServicer(frontend))
        # Any: the health package has no types.
        self._health: Any = health.aio.HealthServicer()  # type: ignore[attr-defined,unused-ignore]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        self._is_serving: bool | None = None
        try:
            self.port = self._server.add_insecure_port(f"{host}:{port}")
        except RuntimeError as exc:
            message = f"cannot listen on {host}:{port}; set PDMESH_GATEWAY_GRPC_PORT"
            raise StartupError(message) from exc

    async def start(self) -> None:
        await self._server.start()

    async def set_serving(self, is_serving: bool) -> None:
        if is_serving == self._is_serving:
            return
        self._is_serving = is_serving
        answers = health_pb2.HealthCheckResponse
        status = answers.SERVING if is_serving else answers.NOT_SERVING
        for name in ("", SERVICE):
            await self._health.set(name, status)

    async def stop(self, grace_s: float) -> None:
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)


def _usage(call: Call) -> Usage:
    return Usage(
        num_prompt_tokens=call.num_prompt_tokens,
        num_completion_tokens=call.num_completion_tokens,
        num_cached_tokens=call.num_cached_tokens,
    )


def _traceparent(context: Context) -> str:
    metadata: Sequence[tuple[str, str | bytes]] = tuple(context.invocation_metadata() or ())
    for key, value in metadata:
        if key == "traceparent" and isinstance(value, str):
            return value
    return ""
