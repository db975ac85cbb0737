"""Limits how many gRPC messages arrive at the same time, and how long each may take.

gRPC reads the message of a unary call before it calls the handler, from any caller, and waits
forever for the last byte. Thus a few connections could make a server hold gigabytes, by sending all
but the last byte of many long messages. A handler of a stream decides itself when to read.
Therefore every method becomes a stream here, and reads only after the caller is admitted.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

import grpc

from pdmesh.errors import DeadlineExceeded, Overloaded

# How far gRPC reads a stream ahead of its handler. By default, gRPC adapts this to the link and may
# read megabytes ahead.
READ_AHEAD: Final = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65536))

_GRACE_S: Final = 0.25
# The number of calls that may wait for their messages. A call costs about 30 KB, and one connection
# can begin a thousand calls.
_MAX_WAITING: Final = 4096

# grpc-stubs has no types for a call's details and for handlers that fit here.
Details = Any
Handler = Any
Context = grpc.aio.ServicerContext[Any, Any]


class Incoming:
    """Receives messages, at most `max_messages` at the same time.

    If another message comes at this bound, the one that has been arriving for longest is refused,
    but not before it has had `_GRACE_S`.
    """

    def __init__(
        self, max_messages: int, timeout_s: float, max_waiting: int = _MAX_WAITING
    ) -> None:
        self._max_waiting = max_waiting
        self._num_waiting = 0
        self._room = asyncio.Semaphore(max_messages)
        self._timeout_s = timeout_s
        self._waits: dict[asyncio.Timeout, float] = {}  # the time at which each wait began
        self._hurried: set[asyncio.Timeout] = set()

    async def next(self, messages: AsyncIterator[Any]) -> Any:
        """Receive one message. Raises StopAsyncIteration, DeadlineExceeded or Overloaded."""
        if self._num_waiting >= self._max_waiting:
            raise Overloaded("too many calls wait for their messages")
        if self._room.locked():
            self._hurry()
        self._num_waiting += 1
        try:
            async with asyncio.timeout(self._timeout_s) as wait, self._room:
                self._waits[wait] = asyncio.get_running_loop().time()
                try:
                    return await anext(messages)
                finally:
                    del self._waits[wait]
        except TimeoutError as exc:
            if wait in self._hurried:
                raise Overloaded("too many messages are being received") from exc
            raise DeadlineExceeded("the request did not arrive completely in time") from exc
        finally:
            self._num_waiting -= 1
            self._hurried.discard(wait)

    def _hurry(self) -> None:
        for wait, since in self._waits.items():
            if wait not in self._hurried:
                self._hurried.add(wait)
                wait.reschedule(min(since + _GRACE_S, wait.when() or math.inf))
                return


class IncomingGuard(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic only in grpc-stubs
    """Makes every method read its messages through `incoming`.

    `admit` is called first. It raises MeshError if the caller may not make the call.
    """

    def __init__(
        self,
        incoming: Callable[[str], Incoming],
        admit: Callable[[str, Context], Awaitable[None]],
        refuse: Callable[[Context, Exception], Awaitable[Any]],
    ) -> None:
        self._incoming, self._admit, self._refuse = incoming, admit, refuse

    async def intercept_service(
        self, continuation: Callable[[Details], Awaitable[Handler]], handler_call_details: Details
    ) -> Handler:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method: str = handler_call_details.method
        incoming = self._incoming(method)

        async def call(messages: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
            try:
                await self._admit(method, context)
                if handler.request_streaming:
                    answers = handler.stream_stream(self._all(incoming, messages), context)
                else:
                    called = handler.unary_stream or handler.unary_unary
                    answers = called(await incoming.next(messages), context)
            except StopAsyncIteration:
                return
            except Exception as exc:  # noqa: BLE001  # the edge: each becomes a status
                await self._refuse(context, exc)
                return
            if not hasattr(answers, "__aiter__"):
                answer = await answers
                if answer is not None:  # if None, the handler has already written its answers
                    yield answer
                return
            async for answer in answers:
                yield answer

        return grpc.stream_stream_rpc_method_handler(
            call, handler.request_deserializer, handler.response_serializer
        )

    async def _all(self, incoming: Incoming, messages: AsyncIterator[Any]) -> AsyncIterator[Any]:
        while True:
            try:
                message = await incoming.next(messages)
            except StopAsyncIteration:
                return
            yield message
