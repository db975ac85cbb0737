"""A server that sends canned answers and computes nothing.

It shows how many requests the load generator can send at most, and the least that HTTP costs on
this machine. Every request gets the same answer: a plain JSON document, or a stream of one event
per token. Each event is written separately, as a streaming server does, with or without a pause
after it. The request says how many tokens the answer has.

    python -m loadtests.harness.canned [PAUSE_S]
"""

from __future__ import annotations

import asyncio
import re
import sys
from typing import Final, cast

from loadtests.harness.client import event_loop_factory

_LENGTH: Final = re.compile(rb"content-length: (\d+)", re.IGNORECASE)
_MAX_TOKENS: Final = re.compile(rb'"max_tokens": (\d+)')
_HEAD: Final = b"HTTP/1.1 200 OK\r\ncontent-type: "
_EVENT: Final = (
    b'data: {"id":"chatcmpl-0123456789abcdef","object":"chat.completion.chunk",'
    b'"created":1700000000,"model":"default",'
    b'"choices":[{"index":0,"delta":{"content":" token"},"finish_reason":null}]}\n\n'
)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _usage(num_tokens: int) -> bytes:
    return b'{"usage":{"prompt_tokens":1,"completion_tokens":%d}}' % num_tokens


class _Canned(asyncio.Protocol):
    def __init__(self, pause_s: float = 0.0) -> None:
        self._pause_s = pause_s
        self._received = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # a TCP connection always has a Transport
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._received += data
        end = self._received.find(b"\r\n\r\n")
        length = _LENGTH.search(self._received)
        if end < 0 or length is None or len(self._received) < end + 4 + int(length[1]):
            return
        request, self._received = self._received, bytearray()
        asked = _MAX_TOKENS.search(request)
        num_tokens = int(asked[1]) if asked else 1
        if b'"stream": true' in request:
            self._stream(num_tokens)
        else:
            body = _usage(num_tokens)
            head = b"application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
            self._transport.write(_HEAD + head + body)

    def _stream(self, num_tokens: int) -> None:
        self._transport.write(_HEAD + b"text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        if self._pause_s:
            self._next_event(num_tokens)
            return
        event = _chunk(_EVENT)
        for _ in range(num_tokens):
            self._transport.write(event)
        self._end(num_tokens)

    def _next_event(self, num_tokens: int, num_written: int = 0) -> None:
        if self._transport.is_closing():
            return
        if num_written == num_tokens:
            self._end(num_tokens)
            return
        self._transport.write(_chunk(_EVENT))
        num_written += 1
        pause_s = self._pause_s if num_written < num_tokens else 0.0
        asyncio.get_running_loop().call_later(pause_s, self._next_event, num_tokens, num_written)

    def _end(self, num_tokens: int) -> None:
        end = _chunk(b"data: " + _usage(num_tokens) + b"\n\n") + _chunk(b"data: [DONE]\n\n")
        self._transport.write(end + b"0\r\n\r\n")


async def _serve(pause_s: float) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Canned(pause_s), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)  # until the parent closes it or exits


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=event_loop_factory()) as runner:
        runner.run(_serve(float(sys.argv[1]) if len(sys.argv) > 1 else 0.0))
