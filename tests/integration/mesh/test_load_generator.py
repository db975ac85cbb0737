"""Tests that the load generator counts exactly what a server sent, however TCP divides the
bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from loadtests.harness.client import (
    LoadResult,
    LoadSpec,
    chat_body,
    run_load,
)

Writer = asyncio.StreamWriter
Answer = Callable[[Writer, bytes], None]

_EVENT = b'data: {"choices":[{"delta":{"content":"%b"}}]}\n\n'
_USAGE = b'data: {"usage":{"prompt_tokens":3,"completion_tokens":3}}\n\ndata: [DONE]\n\n'
_STREAM_HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


@asynccontextmanager
async def serving(answer: Callable[[Writer], AsyncIterator[None]]) -> AsyncIterator[int]:
    async def serve(reader: asyncio.StreamReader, writer: Writer) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
                await reader.readexactly(length)
                async for _ in answer(writer):
                    await writer.drain()
                    await asyncio.sleep(0)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the generator has closed its connection
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def load(port: int, *, is_stream: bool, max_requests: int = 20) -> LoadResult:
    body = chat_body("hello", 3, is_stream=is_stream)
    spec = LoadSpec("127.0.0.1", port, "/v1/chat/completions", (body,), 2, 0.0, 2.0, max_requests)
    return await run_load(spec)


def test_load_on_a_mesh_s_address_needs_its_port() -> None:
    spec = LoadSpec.of_url(
        "http://127.0.0.1:8000",
        "/v1/completions",
        ["{}"],
        concurrency=2,
        warmup_s=0.5,
        duration_s=3.0,
    )
    assert spec == LoadSpec("127.0.0.1", 8000, "/v1/completions", ("{}",), 2, 0.5, 3.0)
    with pytest.raises(ValueError, match="has no host and port"):
        LoadSpec.of_url("http://mesh", "/", [], concurrency=1, warmup_s=0.0, duration_s=1.0)


async def test_a_stream_cut_into_single_bytes_is_counted_like_a_whole_one() -> None:
    async def answer(writer: Writer) -> AsyncIterator[None]:
        body = b"".join(chunk(_EVENT % text) for text in (b"", b"a", b"b")) + chunk(_USAGE)
        for byte in _STREAM_HEAD + body + b"0\r\n\r\n":
            writer.write(bytes([byte]))
            yield

    async with serving(answer) as port:
        result = await load(port, is_stream=True, max_requests=4)
    assert not result.errors
    assert result.num_requests >= 4
    assert result.num_tokens == 3 * result.num_requests


async def test_the_first_token_is_the_first_event_with_text_not_the_role() -> None:
    async def answer(writer: Writer) -> AsyncIterator[None]:
        writer.write(_STREAM_HEAD + chunk(_EVENT % b""))
        yield
        await asyncio.sleep(0.05)
        writer.write(chunk(_EVENT % b"a") + chunk(_USAGE) + b"0\r\n\r\n")
        yield

    async with serving(answer) as port:
        result = await load(port, is_stream=True, max_requests=4)
    assert not result.errors
    assert result.ttft.quantile(0.01) >= 0.049


async def test_a_stall_between_two_tokens_shows_in_the_gaps() -> None:
    async def answer(writer: Writer) -> AsyncIterator[None]:
        writer.write(_STREAM_HEAD + chunk(_EVENT % b"a"))
        yield
        await asyncio.sleep(0.042)
        writer.write(chunk(_EVENT % b"b") + chunk(_USAGE) + b"0\r\n\r\n")
        yield

    async with serving(answer) as port:
        result = await load(port, is_stream=True, max_requests=4)
    assert not result.errors
    assert result.gaps.quantile(0.01) >= 0.041


async def test_errors_and_answers_without_usage_are_errors_not_tokens() -> None:
    answers = 0

    async def answer(writer: Writer) -> AsyncIterator[None]:
        nonlocal answers
        answers += 1
        if answers % 2:
            writer.write(b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 2\r\n\r\n{}")
        else:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
        yield

    async with serving(answer) as port:
        body = chat_body("hello", 3, is_stream=False)
        spec = LoadSpec("127.0.0.1", port, "/v1/chat/completions", (body,), 1, 0.0, 0.4)
        result = await run_load(spec)
    assert result.num_requests == 0
    assert result.errors["status 503"] >= 2
    assert result.errors["no usage"] >= 1


async def test_a_server_that_closes_in_the_middle_is_an_error_and_the_load_continues() -> None:
    answers = 0

    async def answer(writer: Writer) -> AsyncIterator[None]:
        nonlocal answers
        answers += 1
        if answers == 3:
            writer.write(_STREAM_HEAD)
            writer.close()
        else:
            writer.write(_STREAM_HEAD + chunk(_EVENT % b"a") + chunk(_USAGE) + b"0\r\n\r\n")
        yield

    async with serving(answer) as port:
        result = await load(port, is_stream=True, max_requests=10)
    assert result.num_requests >= 10
    assert sum(n for what, n in result.errors.items() if what.startswith("connection lost")) == 1
