"""Opens a call and sends its answer, in the format of any API.

A call is one request of a client. Its answer has one or more choices. A delta is a new piece of one
choice. A write to a stream sends all text that has come since the last write. An error before the
first write becomes an HTTP status. A later error becomes the last event of the stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final, NoReturn, Protocol

from pdmesh.errors import MeshError
from pdmesh.services.gateway.access.access_control import Permit, charged
from pdmesh.services.gateway.http.exchange import HttpExchange
from pdmesh.services.gateway.request.deltas import AnswerStream, whole_text
from pdmesh.services.gateway.request.frontend import Call, Frontend
from pdmesh.services.gateway.request.spec import CallSpec
from pdmesh.services.gateway.text.choice_text import TextDelta

# A delta with more log probabilities than this is encoded in a thread. Each log probability names
# up to 21 tokens.
MAX_LOGPROBS_HERE: Final = 256
_EVENT_STREAM: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


class StreamWriter(Protocol):
    """The events of one streamed call."""

    def opening(self) -> bytes:
        """The bytes before the first chunk. They are sent together with this chunk."""
        ...

    def chunk(self, delta: TextDelta) -> bytes: ...

    async def closing(self) -> bytes:
        """The bytes after the last delta of every choice."""
        ...


class AnswerFormat(Protocol):
    """The format of the answer to one request."""

    def stream(self, call: Call) -> StreamWriter: ...

    async def whole(self, call: Call, deltas: Sequence[TextDelta]) -> bytes:
        """The body of an answer that is not streamed.

        `deltas` has one delta for each choice, with all of its text.
        """
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
    """Begin a call. The caller must close it. Raises MeshError."""
    is_quiet = not (is_streamed or spec.sampling.ends_by_text)
    traceparent = exchange.header(b"traceparent")
    prepared = await frontend.prepare(spec)
    return await charged(
        permit,
        lambda: frontend.open(
            prepared,
            exchange.request_id,
            permit,
            traceparent,
            is_quiet=is_quiet,
            handed=exchange.handed,
        ),
    )


async def _stream(exchange: HttpExchange, call: Call, writer: StreamWriter) -> None:
    stream = AnswerStream(call)
    try:
        await _written(exchange, call, writer, stream)
    finally:
        stream.close()


async def _written(
    exchange: HttpExchange, call: Call, writer: StreamWriter, stream: AnswerStream
) -> None:
    pending: list[bytes] = [writer.opening()]
    while stream.num_open:
        for delta in await stream.news():
            if delta.num_logprobs <= MAX_LOGPROBS_HERE:
                pending.append(writer.chunk(delta))
            else:
                pending.append(await asyncio.to_thread(writer.chunk, delta))
        if stream.failure is not None:
            await _end_badly(exchange, call, stream.failure, pending)
        if not stream.num_open:
            pending.append(await writer.closing())
        data = b"".join(pending)
        if not data or (len(pending) == 1 and not exchange.has_started):
            continue
        if not exchange.has_started:
            await exchange.start(200, list(_EVENT_STREAM))
        pending.clear()
        await exchange.write(data, is_last=not stream.num_open)


async def _end_badly(
    exchange: HttpExchange, call: Call, failure: Exception, pending: list[bytes]
) -> NoReturn:
    """Raise the failure. If the stream has begun, first send the pending output of all choices.

    If no stream has begun, the pending output is dropped, and the failure becomes an HTTP status.
    """
    if exchange.has_started and (data := b"".join(pending)):
        await exchange.write(data)
    call.is_void = isinstance(failure, MeshError) and not exchange.has_started
    raise failure
