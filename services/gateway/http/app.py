"""The OpenAI-compatible endpoint: a raw ASGI application.

A framework would cost more than all else here. A stream's writer takes all text that gathered since
its last write and sends it as one chunk for each choice.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec
import structlog

from pdmesh.core.tenancy.limits import Tenant
from pdmesh.errors import InvalidRequest, MeshError, shortened
from pdmesh.services.gateway.access.access_control import (
    AccessControl,
    Permit,
    charged,
    check_model,
)
from pdmesh.services.gateway.http.answers import (
    ChatChunk,
    ChatCompletion,
    Completion,
    CompletionChunk,
    Live,
    ModelEntry,
    ModelList,
    Readiness,
    Tokenized,
)
from pdmesh.services.gateway.http.calls import chat_spec, completion_spec, tokenized
from pdmesh.services.gateway.http.exchange import (
    BodyRoom,
    ClientDisconnected,
    HttpExchange,
    Receive,
    Scope,
    Send,
)
from pdmesh.services.gateway.http.format import ChunkWriter, error_chunk, whole_body
from pdmesh.services.gateway.http.openapi import document
from pdmesh.services.gateway.http.routes import HttpRoute, Operation, Router
from pdmesh.services.gateway.http.schema import (
    ChatCompletionRequest,
    CompletionRequest,
    TokenizeRequest,
    parse_chat,
    parse_completion,
    parse_tokenize,
)
from pdmesh.services.gateway.request.frontend import Call, Frontend
from pdmesh.services.gateway.request.spec import CallSpec
from pdmesh.services.gateway.text.choice_text import TextDelta

log = structlog.get_logger(__name__)

_SWEEP_S: Final = 0.5
# Each may have up to 21 tokens to spell. More of them are made outside the event loop.
_MAX_LOGPROBS_HERE: Final = 256
_EVENT_STREAM: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
# The statuses of errors: of those that ask for a model, and of those that say what there is.
_ASKING: Final = (400, 401, 403, 404, 413, 429, 500, 503, 504)
_TELLING: Final = (401, 403, 404, 429, 500, 503)


@dataclass(frozen=True, slots=True)
class HttpBounds:
    """What clients may send at most, and how slowly they may read.

    `is_strict`: unknown fields are refused.
    """

    max_body_bytes: int
    max_incoming_bytes: int
    write_timeout_s: float
    is_strict: bool = False


class HttpApp:
    def __init__(
        self,
        frontend: Frontend,
        access: AccessControl,
        not_ready: Callable[[], list[str]],
        bounds: HttpBounds,
    ) -> None:
        self._is_strict = bounds.is_strict
        self.body_room = BodyRoom(bounds.max_incoming_bytes)
        self._frontend = frontend
        self._access = access
        self._not_ready = not_ready
        self._max_body_bytes = bounds.max_body_bytes
        self._write_timeout_s = bounds.write_timeout_s
        self._writing: dict[HttpExchange, None] = {}
        self._router = Router(self._routes())
        self._openapi = b""

    @property
    def routes(self) -> Sequence[HttpRoute]:
        return self._router.routes

    def _routes(self) -> list[HttpRoute]:
        return [
            HttpRoute(
                "POST",
                "/v1/chat/completions",
                self._chat,
                Operation(
                    "Continue a conversation",
                    ChatCompletion,
                    takes=ChatCompletionRequest,
                    streams=ChatChunk,
                    errors=_ASKING,
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
                    errors=_ASKING,
                ),
            ),
            HttpRoute(
                "POST",
                "/tokenize",
                self._tokenize,
                Operation(
                    "The tokens of a prompt", Tokenized, takes=TokenizeRequest, errors=_ASKING
                ),
            ),
            HttpRoute(
                "GET",
                "/v1/models",
                self._models,
                Operation("The served models", ModelList, errors=_TELLING),
            ),
            HttpRoute(
                "GET",
                "/v1/models/{model:path}",
                self._model,
                Operation("A served model", ModelEntry, errors=_TELLING),
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
        self._writing[exchange] = None
        try:
            handler, exchange.path_parameters = self._router.find(scope["path"], scope["method"])
            await handler(exchange)
        except ClientDisconnected:
            pass
        except MeshError as exc:
            await self._fail(exchange, exc.with_traceback(None))  # its frames would hold the body
        except Exception:
            log.exception("http.bug", path=shortened(scope["path"]), request_id=exchange.request_id)
            await self._fail(exchange, MeshError("internal error; the server's log has the cause"))
        finally:
            del self._writing[exchange]

    async def _fail(self, exchange: HttpExchange, error: MeshError) -> None:
        """Send an error response; if the stream has begun, one error event and no [DONE]."""
        if exchange.has_started:
            await exchange.write(error_chunk(error), is_last=True)
        else:
            await exchange.error(error)

    async def run(self) -> None:
        """Cut clients that have not read for too long."""
        while True:
            await asyncio.sleep(_SWEEP_S)
            limit = time.monotonic() - self._write_timeout_s
            for exchange in [e for e in self._writing if e.blocked_since < limit]:
                log.info("http.client_not_reading", request_id=exchange.request_id)
                exchange.cut()

    # --- generation ------------------------------------------------------------------------------

    async def _chat(self, exchange: HttpExchange) -> None:
        permit = await self._enter(exchange)
        try:
            body = await exchange.body(self._max_body_bytes, self.body_room)
            request = parse_chat(body, self._ignored(exchange))
            spec = await chat_spec(request, self._frontend, permit.tenant)
            await self._answer(exchange, request, spec, permit)
        finally:
            permit.leave()

    async def _completion(self, exchange: HttpExchange) -> None:
        permit = await self._enter(exchange)
        try:
            body = await exchange.body(self._max_body_bytes, self.body_room)
            request = parse_completion(body, self._ignored(exchange))
            spec = await completion_spec(request, self._frontend, permit.tenant)
            await self._answer(exchange, request, spec, permit)
        finally:
            permit.leave()

    def _ignored(self, exchange: HttpExchange) -> list[str] | None:
        """Where the names of unknown fields are put; None where they are refused."""
        return None if self._is_strict else exchange.ignored_fields

    async def _enter(self, exchange: HttpExchange) -> Permit:
        """Raises MeshError, before anything is read."""
        self._frontend.check_open()
        return await self._access.enter(exchange.header(b"authorization"))

    async def _answer(
        self,
        exchange: HttpExchange,
        request: ChatCompletionRequest | CompletionRequest,
        spec: CallSpec,
        permit: Permit,
    ) -> None:
        is_quiet = not request.stream and not spec.sampling.stop
        if request.stream_options is not None and not request.stream:
            raise InvalidRequest("stream_options needs stream", field="stream_options")
        traceparent = exchange.header(b"traceparent")
        call = await charged(
            permit,
            lambda: self._frontend.open(
                spec, exchange.request_id, permit, traceparent, is_quiet=is_quiet
            ),
        )
        exchange.connection.watch(call.cancel)
        error: MeshError | None = None
        try:
            if request.stream:
                options = request.stream_options
                include_usage = bool(options and options.include_usage)
                counts_each = include_usage and bool(options and options.continuous_usage_stats)
                await self._stream(
                    exchange, call, include_usage=include_usage, counts_each=counts_each
                )
            else:
                await self._whole(exchange, call)
        except MeshError as exc:
            error = exc
            raise
        finally:
            exchange.connection.unwatch()
            self._frontend.close(call, error)

    async def _whole(self, exchange: HttpExchange, call: Call) -> None:
        parts: list[list[TextDelta]] = [[] for _ in call.generations]
        num_open = len(parts)
        while num_open:
            await call.changed()
            for delta in call.take():
                parts[delta.index].append(delta)
                num_open -= delta.is_last
                if delta.error is not None:
                    call.is_void = True
                _raise_if_ended_badly(delta)
        deltas = [_joined(pieces) for pieces in parts]
        if sum(len(delta.logprobs) for delta in deltas) <= _MAX_LOGPROBS_HERE:
            body = whole_body(call, deltas)
        else:
            body = await asyncio.to_thread(whole_body, call, deltas)
        await exchange.json(body)

    async def _stream(
        self, exchange: HttpExchange, call: Call, *, include_usage: bool, counts_each: bool
    ) -> None:
        chunks = ChunkWriter(
            call,
            include_usage=include_usage,
            has_logprobs=call.spec.sampling.num_logprobs is not None,
            counts_each=counts_each,
        )
        num_open = len(call.generations)
        pending: list[bytes] = [chunks.opening()]
        while num_open:
            await call.changed()
            deltas = call.take()
            for delta in map(_without_a_bad_end, deltas):
                num_open -= delta.is_last
                if len(delta.logprobs) <= _MAX_LOGPROBS_HERE:
                    pending.append(chunks.chunk(delta))
                else:
                    pending.append(await asyncio.to_thread(chunks.chunk, delta))
            for delta in deltas:
                await self._end_if_badly(exchange, call, delta, pending)
            if num_open == 0:
                pending.append(chunks.closing())
            data = b"".join(pending)
            if not data or (len(pending) == 1 and not exchange.has_started):
                continue
            if not exchange.has_started:
                await exchange.start(200, list(_EVENT_STREAM))
            pending.clear()
            await exchange.write(data, is_last=num_open == 0)

    async def _end_if_badly(
        self, exchange: HttpExchange, call: Call, delta: TextDelta, pending: list[bytes]
    ) -> None:
        """Send what came before an error, of all choices, then raise the error.

        It becomes a status if nothing was sent yet.
        """
        if not delta.is_last or delta.finish_reason is not None:
            return
        if exchange.has_started and (data := b"".join(pending)):
            await exchange.write(data)
        call.is_void = delta.error is not None and not exchange.has_started
        _raise_if_ended_badly(delta)

    # --- the rest --------------------------------------------------------------------------------

    async def _models(self, exchange: HttpExchange) -> None:
        tenant = await self._known(exchange)
        names = self._frontend.shared.fleet.models()
        models = [_model_entry(n) for n in names if not tenant.models or n in tenant.models]
        await exchange.json(msgspec.json.encode({"object": "list", "data": models}))

    async def _model(self, exchange: HttpExchange) -> None:
        tenant = await self._known(exchange)
        model = self._frontend.model_name(exchange.path_parameters["model"])
        check_model(tenant, model)
        await exchange.json(msgspec.json.encode(_model_entry(model)))

    async def _tokenize(self, exchange: HttpExchange) -> None:
        permit = await self._enter(exchange)
        try:
            body = await exchange.body(self._max_body_bytes, self.body_room)
            request = parse_tokenize(body, self._ignored(exchange))
            tokens, context = await tokenized(request, self._frontend, permit.tenant)
            await charged(permit, lambda: permit.charge(len(tokens)))
            permit.settle(len(tokens))
        finally:
            permit.leave()
        found = {"count": len(tokens), "max_model_len": context, "tokens": tokens.tolist()}
        await exchange.json(msgspec.json.encode(found))

    async def _known(self, exchange: HttpExchange) -> Tenant:
        """The tenant that asks. Raises MeshError; counts as a request."""
        permit = await self._access.enter(exchange.header(b"authorization"))
        permit.leave()
        return permit.tenant

    async def _document(self, exchange: HttpExchange) -> None:
        self._openapi = self._openapi or msgspec.json.encode(document(self._router.routes))
        await exchange.json(self._openapi)

    async def _live(self, exchange: HttpExchange) -> None:
        await exchange.json(b'{"status":"live"}')

    async def _ready(self, exchange: HttpExchange) -> None:
        missing = self._not_ready()
        body = {"status": "not ready" if missing else "ready", "waiting_for": missing}
        await exchange.json(msgspec.json.encode(body), 503 if missing else 200)


def _raise_if_ended_badly(delta: TextDelta) -> None:
    if delta.is_last and delta.finish_reason is None:
        raise delta.error if delta.error is not None else ClientDisconnected


def _without_a_bad_end(delta: TextDelta) -> TextDelta:
    """What the client gets of a delta that ends in an error: its tokens without a finish reason."""
    is_bad = delta.is_last and delta.finish_reason is None
    return replace(delta, is_last=False, error=None) if is_bad else delta


def _joined(pieces: list[TextDelta]) -> TextDelta:
    if len(pieces) == 1:
        return pieces[0]
    last = pieces[-1]
    return TextDelta(
        last.index,
        "".join(p.text for p in pieces),
        [t for p in pieces for t in p.token_ids],
        [lp for p in pieces for lp in p.logprobs],
        True,
        last.finish_reason,
    )


def _model_entry(name: str) -> dict[str, str | int]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "pdmesh"}
