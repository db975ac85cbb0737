"""Carries a call from its opening to its last byte, in any API's format.

A stream's writer takes all text that gathered since its last write and sends it as one chunk for
each choice. An error before the first text becomes a status; later it is the stream's last event.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, Protocol

from pdmesh.errors import MeshError
from pdmesh.services.gateway.access.access_control import Permit, charged
from pdmesh.services.gateway.http.exchange import ClientDisconnected, HttpExchange
from pdmesh.services.gateway.parsing.answer_parsing import CallParser
from pdmesh.services.gateway.request.frontend import Call, Frontend
from pdmesh.services.gateway.request.spec import CallSpec
from pdmesh.services.gateway.text.choice_text import TextDelta

# Each may have up to 21 tokens to spell. More of them are made outside the event loop.
MAX_LOGPROBS_HERE: Final = 256
_EVENT_STREAM: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


class StreamWriter(Protocol):
    """The events of one streamed call."""

    def opening(self) -> bytes:
        """What comes before the first chunk, and is sent with it."""
        ...

    def chunk(self, delta: TextDelta) -> bytes: ...

    async def closing(self) -> bytes:
        """What comes after the last delta of each choice."""
        ...


class AnswerFormat(Protocol):
    """How one request is answered."""

    def stream(self, call: Call) -> StreamWriter: ...

    async def whole(self, call: Call, deltas: Sequence[TextDelta]) -> bytes:
        """The answer that is not streamed; `deltas` holds all of each choice at its index."""
        ...


async def answer(
    exchange: HttpExchange,
    spec: CallSpec,
    permit: Permit,
    frontend: Frontend,
    written: AnswerFormat,
    *,
    is_streamed: bool,
) -> None:
    """Raises MeshError and ClientDisconnected."""
    call = await opened(exchange, spec, permit, frontend, is_streamed=is_streamed)
    exchange.connection.watch(call.cancel)
    error: MeshError | None = None
    try:
        if is_streamed:
            await _stream(exchange, call, written.stream(call))
        else:
            await exchange.json(await written.whole(call, await whole_text(call)))
    except MeshError as exc:
        error = exc
        raise
    finally:
        exchange.connection.unwatch()
        frontend.close(call, error)


async def opened(
    exchange: HttpExchange,
    spec: CallSpec,
    permit: Permit,
    frontend: Frontend,
    *,
    is_streamed: bool,
) -> Call:
    """A call that has begun, and must be closed. Raises MeshError."""
    is_quiet = not is_streamed and not spec.sampling.stop
    traceparent = exchange.header(b"traceparent")
    return await charged(
        permit,
        lambda: frontend.open(spec, exchange.request_id, permit, traceparent, is_quiet=is_quiet),
    )


async def whole_text(call: Call) -> list[TextDelta]:
    """All of each choice, parsed if its call asks for that.

    Raises what a choice failed of, or ClientDisconnected.
    """
    deltas = await _whole_choices(call)
    parser = _parser_of(call, is_whole=True)
    if parser is None:
        return deltas
    try:
        deltas = await parser.parsed(deltas)
    finally:
        parser.close()
    call.num_reasoning_tokens = sum(delta.num_reasoning_tokens for delta in deltas)
    return deltas


def _parser_of(call: Call, *, is_whole: bool) -> CallParser | None:
    spec = call.spec
    if spec.parsing is None:
        return None
    prompts = [generation.prompt.tokens for generation in call.generations]
    return spec.parsing.begin(prompts, spec.text_rules, is_whole=is_whole)


async def _whole_choices(call: Call) -> list[TextDelta]:
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
    return [_joined(pieces) for pieces in parts]


async def _stream(exchange: HttpExchange, call: Call, writer: StreamWriter) -> None:
    parser = _parser_of(call, is_whole=False)
    try:
        await _written(exchange, call, writer, parser)
    finally:
        if parser is not None:
            parser.close()


async def _written(
    exchange: HttpExchange, call: Call, writer: StreamWriter, parser: CallParser | None
) -> None:
    num_open = len(call.generations)
    pending: list[bytes] = [writer.opening()]
    while num_open:
        await call.changed()
        deltas = call.take()
        shown = deltas if parser is None else await parser.parsed(deltas)
        for delta in map(_without_a_bad_end, shown):
            num_open -= delta.is_last
            call.num_reasoning_tokens += delta.num_reasoning_tokens
            if delta.num_logprobs <= MAX_LOGPROBS_HERE:
                pending.append(writer.chunk(delta))
            else:
                pending.append(await asyncio.to_thread(writer.chunk, delta))
        for delta in deltas:
            await _end_if_badly(exchange, call, delta, pending)
        if num_open == 0:
            pending.append(await writer.closing())
        data = b"".join(pending)
        if not data or (len(pending) == 1 and not exchange.has_started):
            continue
        if not exchange.has_started:
            await exchange.start(200, list(_EVENT_STREAM))
        pending.clear()
        await exchange.write(data, is_last=num_open == 0)


async def _end_if_badly(
    exchange: HttpExchange, call: Call, delta: TextDelta, pending: list[bytes]
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
    return replace(
        last,
        text="".join(p.text for p in pieces),
        token_ids=[t for p in pieces for t in p.token_ids],
        logprobs=[lp for p in pieces for lp in p.logprobs],
        prompt_logprobs=next((p.prompt_logprobs for p in pieces if p.prompt_logprobs), None),
    )
