"""The gateway's public HTTP endpoint: all its routes, and the handlers of its simpler paths.

The endpoint is a raw ASGI application. A web framework would take more time for a request than all
other work in the gateway.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec
import structlog

from pdmesh.errors import InvalidRequest, MeshError, NoInstance, shortened
from pdmesh.services.gateway.access.access_control import (
    AccessControl,
    check_model,
)
from pdmesh.services.gateway.http.answers import (
    ChatChunk,
    ChatCompletion,
    Completion,
    CompletionChunk,
    Detokenized,
    Live,
    ModelEntry,
    ModelList,
    Readiness,
    Tokenized,
)
from pdmesh.services.gateway.http.errors import OPENAI_ERRORS
from pdmesh.services.gateway.http.exchange import (
    HttpExchange,
    Receive,
    Scope,
    Send,
)
from pdmesh.services.gateway.http.format import OpenAiFormat
from pdmesh.services.gateway.http.messages.errors import ANTHROPIC_ERRORS
from pdmesh.services.gateway.http.messages.paths import PREFIX, MessagesPaths
from pdmesh.services.gateway.http.openapi import document
from pdmesh.services.gateway.http.pooling.paths import PoolingPaths
from pdmesh.services.gateway.http.responses.paths import ResponsesPaths
from pdmesh.services.gateway.http.responses.store import ResponseStore
from pdmesh.services.gateway.http.routes import (
    ASKING_ERRORS,
    TELLING_ERRORS,
    HttpRoute,
    Operation,
    Router,
)
from pdmesh.services.gateway.http.serving.answering import answer
from pdmesh.services.gateway.http.serving.intake import HttpBounds, Intake
from pdmesh.services.gateway.openai.calls import (
    chat_spec,
    completion_spec,
    detokenized,
    tokenized,
)
from pdmesh.services.gateway.openai.schema import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    parse_chat,
    parse_completion,
    parse_detokenize,
    parse_tokenize,
)
from pdmesh.services.gateway.request.deltas import ClientDisconnected
from pdmesh.services.gateway.request.frontend import Frontend
from pdmesh.services.gateway.routing.fleet import KnownModel
from pdmesh.services.gateway.routing.handed_plans import PLAN_HEADER
from pdmesh.services.gateway.slow_clients import SlowClients

log = structlog.get_logger(__name__)

_PLAN: Final = PLAN_HEADER.encode()


class HttpApp:
    def __init__(
        self,
        frontend: Frontend,
        access: AccessControl,
        not_ready: Callable[[], list[str]],
        bounds: HttpBounds,
        responses: ResponseStore,
    ) -> None:
        self._intake = Intake(frontend, access, bounds)
        self.body_room = self._intake.body_room
        self._frontend = frontend
        self._not_ready = not_ready
        self.writing = SlowClients("http", bounds.write_timeout_s)
        self._store = responses
        self._responses = ResponsesPaths(frontend, self._intake, responses)
        self._router = Router(self._routes())
        self._openapi = b""

    @property
    def routes(self) -> Sequence[HttpRoute]:
        return self._router.routes

    def _routes(self) -> list[HttpRoute]:
        return [
            *MessagesPaths(self._frontend, self._intake).routes(),
            *self._responses.routes(),
            *PoolingPaths(self._frontend, self._intake).routes(),
            HttpRoute(
                "POST",
                "/v1/chat/completions",
                self._chat,
                Operation(
                    "Continue a conversation",
                    ChatCompletion,
                    takes=ChatCompletionRequest,
                    streams=ChatChunk,
                    errors=ASKING_ERRORS,
                ),
            ),
            HttpRoute(
                "POST",
                "/v1/completions",
                self._completion,
                Operation(
                    "Continue a text",
                    Completion,
                    takes=CompletionRequest,
                    streams=CompletionChunk,
                    errors=ASKING_ERRORS,
                ),
            ),
            HttpRoute(
                "POST",
                "/tokenize",
                self._tokenize,
                Operation(
                    "The tokens of a prompt",
                    Tokenized,
                    takes=TokenizeRequest,
                    errors=ASKING_ERRORS,
                ),
            ),
            HttpRoute(
                "POST",
                "/detokenize",
                self._detokenize,
                Operation(
                    "The text of tokens",
                    Detokenized,
                    takes=DetokenizeRequest,
                    errors=ASKING_ERRORS,
                ),
            ),
            HttpRoute(
                "GET",
                "/v1/models",
                self._models,
                Operation(
                    "The served models",
                    ModelList,
                    errors=TELLING_ERRORS,
                    makes={"model": "/data/0/id"},
                ),
            ),
            HttpRoute(
                "GET",
                "/v1/models/{model:path}",
                self._model,
                Operation("A served model", ModelEntry, errors=TELLING_ERRORS),
            ),
            HttpRoute(
                "GET",
                "/health/live",
                self._live,
                Operation("Whether the gateway runs", Live, is_open=True),
            ),
            HttpRoute(
                "GET",
                "/health/ready",
                self._ready,
                Operation(
                    "Whether requests are served", Readiness, other={503: Readiness}, is_open=True
                ),
            ),
            HttpRoute(
                "GET",
                "/openapi.json",
                self._document,
                Operation("This document", dict[str, Any], is_open=True),
            ),
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        exchange = HttpExchange(scope, receive, send)
        if scope["path"].startswith(PREFIX):
            exchange.errors = ANTHROPIC_ERRORS
        self.writing.add(exchange)
        try:
            exchange.use(self._frontend.take_handed(exchange.header(_PLAN)))
            handler, exchange.path_parameters = self._router.find(scope["path"], scope["method"])
            await handler(exchange)
        except ClientDisconnected as exc:
            exc.with_traceback(None)
        except MeshError as exc:
            # The frames of the traceback would keep the body and the images in memory.
            await self._fail(exchange, exc.with_traceback(None))
        except Exception:
            log.exception("http.bug", path=shortened(scope["path"]), request_id=exchange.request_id)
            await self._fail(exchange, MeshError("internal error; the server's log has the cause"))
        finally:
            self.writing.remove(exchange)
            # The error format of a stream refers to the call, and would keep it in memory.
            exchange.errors = OPENAI_ERRORS

    async def _fail(self, exchange: HttpExchange, error: MeshError) -> None:
        """Send an error response. If a stream has begun, send one error event and no [DONE]."""
        if exchange.has_started:
            await exchange.write(exchange.errors.event(error), is_last=True)
            return
        with contextlib.suppress(ClientDisconnected):
            await exchange.error(error)

    async def run(self) -> None:
        """Runs until cancelled."""
        await self.writing.run()

    async def close(self) -> None:
        await self._responses.background.close()
        await self._store.close()

    # --- generation ------------------------------------------------------------------------------

    async def _chat(self, exchange: HttpExchange) -> None:
        permit = await self._intake.admit(exchange)
        try:
            ignored = self._intake.ignored(exchange)
            request = parse_chat(await self._intake.body(exchange), ignored)
            with exchange.watched():
                spec = await chat_spec(request, self._frontend, permit)
            is_streamed, written = bool(request.stream), _format_of(request)
            del request  # base64 images in the request take much memory
            await answer(exchange, spec, permit, self._frontend, written, is_streamed=is_streamed)
        finally:
            permit.leave()

    async def _completion(self, exchange: HttpExchange) -> None:
        permit = await self._intake.admit(exchange)
        try:
            ignored = self._intake.ignored(exchange)
            request = parse_completion(await self._intake.body(exchange), ignored)
            with exchange.watched():
                spec = await completion_spec(request, self._frontend, permit.tenant)
            is_streamed, written = bool(request.stream), _format_of(request)
            await answer(exchange, spec, permit, self._frontend, written, is_streamed=is_streamed)
        finally:
            permit.leave()

    # --- the rest --------------------------------------------------------------------------------

    async def _models(self, exchange: HttpExchange) -> None:
        tenant = await self._intake.known(exchange)
        served = self._frontend.shared.fleet.models()
        models = [_model_entry(m) for m in served if tenant.may_use(m.name)]
        await exchange.json(msgspec.json.encode({"object": "list", "data": models}))

    async def _model(self, exchange: HttpExchange) -> None:
        tenant = await self._intake.known(exchange)
        asked = exchange.path_parameters["model"]
        is_pooling = self._frontend.shared.fleet.is_pooling_model(asked)
        name = asked if is_pooling else self._frontend.model_name(asked)
        check_model(tenant, name)
        model = next((m for m in self._frontend.shared.fleet.models() if m.name == name), None)
        if model is None:
            raise NoInstance(f"no instance serves {name} now")
        await exchange.json(msgspec.json.encode(_model_entry(model)))

    async def _tokenize(self, exchange: HttpExchange) -> None:
        permit = await self._intake.admit(exchange)
        try:
            body = await self._intake.body(exchange)
            request = parse_tokenize(body, self._intake.ignored(exchange))
            with exchange.watched():
                tokens, model = await tokenized(request, self._frontend, permit)
            strings = await model.tokenizer.strings(tokens) if request.return_token_strs else None
        finally:
            permit.leave()
        found = {
            "count": len(tokens),
            "max_model_len": model.context_length,
            "tokens": tokens.tolist(),
            "token_strs": strings,
        }
        await exchange.json(msgspec.json.encode(found))

    async def _detokenize(self, exchange: HttpExchange) -> None:
        permit = await self._intake.admit(exchange)
        try:
            body = await self._intake.body(exchange)
            request = parse_detokenize(body, self._intake.ignored(exchange))
            text = await detokenized(request, self._frontend, permit)
        finally:
            permit.leave()
        await exchange.json(msgspec.json.encode({"prompt": text}))

    async def _document(self, exchange: HttpExchange) -> None:
        if not self._openapi:
            described = document(self._router.routes, is_strict=self._intake.is_strict)
            self._openapi = msgspec.json.encode(described)
        await exchange.json(self._openapi)

    async def _live(self, exchange: HttpExchange) -> None:
        await exchange.json(b'{"status":"live"}')

    async def _ready(self, exchange: HttpExchange) -> None:
        missing = self._not_ready()
        body = {"status": "not ready" if missing else "ready", "waiting_for": missing}
        await exchange.json(msgspec.json.encode(body), 503 if missing else 200)


def _format_of(request: ChatCompletionRequest | CompletionRequest) -> OpenAiFormat:
    """Raises InvalidRequest."""
    options = request.stream_options
    if options is not None and not request.stream:
        raise InvalidRequest("stream_options needs stream", field="stream_options")
    include_usage = bool(options and options.include_usage)
    counts_each = include_usage and bool(options and options.continuous_usage_stats)
    return OpenAiFormat(include_usage=include_usage, counts_each=counts_each)


def _model_entry(model: KnownModel) -> ModelEntry:
    return ModelEntry(
        id=model.name,
        object="model",
        created=int(time.time() - model.age_s),
        owned_by="pdmesh",
        root=model.name,
        parent=model.parent,
        max_model_len=model.max_model_len,
    )
