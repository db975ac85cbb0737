"""A load generator for the OpenAI endpoints that uses less CPU than the server it measures.

Each connection is an `asyncio.Protocol` on a kept-alive TCP_NODELAY socket. It sends its next
request as soon as an answer ends, or at Poisson times if a rate is given. To save CPU, the
generator does not parse answers as JSON. It finds the end by the HTTP framing, counts the events,
and takes the number of tokens from the `usage` that the server reports. A run against
`loadtests.harness.canned` shows how much the generator itself can send.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import re
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, cast
from urllib.parse import urlsplit

from loadtests.harness.histogram import Histogram

_HEADER_END: Final = b"\r\n\r\n"
_LAST_CHUNK: Final = b"\r\n0\r\n\r\n"
_EVENT: Final = b"data: "
_CONTENT_LENGTH: Final = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_CHUNKED: Final = re.compile(rb"\r\ntransfer-encoding: *chunked", re.IGNORECASE)
_FIRST_TEXT: Final = re.compile(rb'"(?:content|text)": ?"[^"]')
_COMPLETION_TOKENS: Final = re.compile(rb'"completion_tokens": ?(\d+)')
# how many bytes of an answer's end are kept; the usage chunk and [DONE] fit
_TAIL_BYTES: Final = 2048
_STUCK_S: Final = 5.0  # an answer still open this long after the run's end counts as stuck
_RECONNECT_S: Final = 0.05  # pause after a refused or broken connection, so that errors do not spin


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """The load that one generator process sends.

    The `bodies` are sent in turn, one per request.
    """

    host: str
    port: int
    path: str
    bodies: tuple[str, ...]
    concurrency: int
    warmup_s: float
    duration_s: float
    max_requests: int | None = None  # the window ends early after this many answers
    # Mean pause of a connection between an answer and its next request. Each pause is random, from
    # half to one and a half of the mean. With equal pauses, requests could fall into step with the
    # timers of the measured server.
    think_s: float = 0.0
    # Requests per second of all connections together, at Poisson times (an open loop). With 0, a
    # connection sends its next request after each answer. With a rate, a request may become due
    # while its connection still waits for an answer. It is then sent when that answer ends, so at
    # most `concurrency` requests are open.
    rate_per_s: float = 0.0

    @classmethod
    def of_url(
        cls,
        http_url: str,
        path: str,
        bodies: Sequence[str],
        *,
        concurrency: int,
        warmup_s: float,
        duration_s: float,
    ) -> LoadSpec:
        """The load for the gateway at `http_url`.

        Raises ValueError if the URL does not have the form http://host:port.
        """
        parts = urlsplit(http_url)
        if parts.hostname is None or parts.port is None:
            raise ValueError(f"{http_url!r} has no host and port")
        return cls(
            parts.hostname, parts.port, path, tuple(bodies), concurrency, warmup_s, duration_s
        )

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> LoadSpec:
        fields = json.loads(text)
        return cls(**{**fields, "bodies": tuple(fields["bodies"])})


@dataclass(slots=True)
class LoadResult:
    """The answers in the measuring window. `ttft` of a plain answer is its whole latency."""

    num_requests: int = 0
    num_tokens: int = 0
    num_events: int = 0
    num_stuck: int = 0
    duration_s: float = 0.0
    errors: Counter[str] = field(default_factory=Counter)
    ttft: Histogram = field(default_factory=Histogram)
    latency: Histogram = field(default_factory=Histogram)
    gaps: Histogram = field(default_factory=Histogram)

    def merge(self, other: LoadResult) -> None:
        self.num_requests += other.num_requests
        self.num_tokens += other.num_tokens
        self.num_events += other.num_events
        self.num_stuck += other.num_stuck
        self.duration_s = max(self.duration_s, other.duration_s)
        self.errors.update(other.errors)
        self.ttft.merge(other.ttft)
        self.latency.merge(other.latency)
        self.gaps.merge(other.gaps)

    @property
    def requests_per_s(self) -> float:
        return self.num_requests / self.duration_s if self.duration_s else 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.duration_s if self.duration_s else 0.0

    def to_json(self) -> str:
        plain = {name: getattr(self, name) for name in _PLAIN_FIELDS}
        histograms = {name: getattr(self, name).to_json() for name in _HISTOGRAMS}
        return json.dumps({**plain, "errors": dict(self.errors), **histograms})

    @classmethod
    def from_json(cls, text: str) -> LoadResult:
        data = json.loads(text)
        result = cls(**{name: data[name] for name in _PLAIN_FIELDS}, errors=Counter(data["errors"]))
        for name in _HISTOGRAMS:
            setattr(result, name, Histogram.from_json(data[name]))
        return result


_PLAIN_FIELDS: Final = ("num_requests", "num_tokens", "num_events", "num_stuck", "duration_s")
_HISTOGRAMS: Final = ("ttft", "latency", "gaps")


class _Run:
    """The state that the connections of one run share."""

    def __init__(self, spec: LoadSpec) -> None:
        self.spec = spec
        self.result = LoadResult()
        self.is_measuring = False
        self.is_over = False
        self.enough = asyncio.Event()
        self._requests: Iterator[bytes] = itertools.cycle(
            [http_request(spec.host, spec.port, spec.path, body.encode()) for body in spec.bodies]
        )

    def next_request(self) -> bytes:
        return next(self._requests)

    def answered(self, num_tokens: int, ttft_s: float, latency_s: float) -> None:
        if not self.is_measuring:
            return
        result = self.result
        result.num_requests += 1
        result.num_tokens += num_tokens
        result.ttft.record(ttft_s)
        result.latency.record(latency_s)
        if result.num_requests == self.spec.max_requests:
            self.enough.set()

    def failed(self, what: str) -> None:
        if self.is_measuring:
            self.result.errors[what] += 1


def http_request(host: str, port: int, path: str, body: bytes) -> bytes:
    head = (
        f"POST {path} HTTP/1.1\r\nhost: {host}:{port}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class _Connection(asyncio.Protocol):
    """One socket, which sends a request, reads the answer, and sends the next request.

    `closed` is set when the socket is closed.
    """

    def __init__(self, run: _Run) -> None:
        self._run = run
        self.closed = asyncio.Event()
        self.sent_at = 0.0
        self.is_waiting = False
        self._transport: asyncio.Transport | None = None
        self._due_at = time.perf_counter()  # when the next request is due, if there is a rate
        self._reset()

    def _reset(self) -> None:
        self._head = b""
        self._is_ok = False
        self._body_left: int | None = None  # bytes to come; None: chunked, or head not read yet
        self._is_in_body = False
        self._first_text_at = 0.0
        self._last_data_at = 0.0
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # a TCP connection always has a Transport
        self._transport = cast(asyncio.Transport, transport)
        sock = self._transport.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._send_in(self._pause_s())

    def connection_lost(self, exc: Exception | None) -> None:
        if self.is_waiting and not self._run.is_over:
            self._run.failed(
                f"connection lost: {type(exc).__name__ if exc else 'closed by server'}"
            )
        self.is_waiting = False
        self.closed.set()

    def _send(self) -> None:
        assert self._transport is not None
        if self._transport.is_closing():
            return
        self._reset()
        self.is_waiting = True
        self.sent_at = time.perf_counter()
        self._transport.write(self._run.next_request())

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if not self._is_in_body:
            data = self._read_head(data)
            if not self._is_in_body:
                return
        if self._body_left is not None:
            self._read_plain(data, now)
        else:
            self._read_events(data, now)

    def _read_head(self, data: bytes) -> bytes:
        """Add `data` to the head. Returns the bytes that follow the head, if `data` has its end."""
        self._head += data
        end = self._head.find(_HEADER_END)
        if end < 0:
            return b""
        head, rest = self._head[: end + 2], self._head[end + 4 :]
        self._is_in_body = True
        self._is_ok = head.startswith(b"HTTP/1.1 200")
        if not self._is_ok:
            self._run.failed(f"status {head[9:12].decode('ascii', 'replace')}")
        length = _CONTENT_LENGTH.search(head)
        if length is not None:
            self._body_left = int(length[1])
        elif not _CHUNKED.search(head):
            self._run.failed("no framing")
            self._close()
        else:
            self._tail = b"\r\n"  # so that a chunked body without chunks ends like any other
        return rest

    def _read_plain(self, data: bytes, now: float) -> None:
        assert self._body_left is not None
        self._body_left -= len(data)
        self._tail = (self._tail + data)[-_TAIL_BYTES:]
        if self._body_left <= 0:
            self._finish(now)

    def _read_events(self, data: bytes, now: float) -> None:
        if self._run.is_measuring and self._is_ok:
            self._run.result.num_events += data.count(_EVENT)
            if self._last_data_at:
                self._run.result.gaps.record(now - self._last_data_at)
        self._tail = (self._tail + data)[-_TAIL_BYTES:]
        if not self._first_text_at and _FIRST_TEXT.search(self._tail):
            self._first_text_at = now
        if self._first_text_at:
            self._last_data_at = now
        if self._tail.endswith(_LAST_CHUNK):
            self._finish(now)

    def _finish(self, now: float) -> None:
        self.is_waiting = False
        if self._is_ok:
            self._count(now)
        if self._run.is_over:
            self._close()
        elif self._is_ok:
            self._send_in(self._pause_s())
        else:
            asyncio.get_running_loop().call_later(_RECONNECT_S, self._close)

    def _pause_s(self) -> float:
        spec = self._run.spec
        if not spec.rate_per_s:
            return spec.think_s * random.uniform(0.5, 1.5)
        self._due_at += random.expovariate(spec.rate_per_s / spec.concurrency)
        return max(0.0, self._due_at - time.perf_counter())

    def _send_in(self, seconds: float) -> None:
        if seconds:
            asyncio.get_running_loop().call_later(seconds, self._send)
        else:
            self._send()

    def _count(self, now: float) -> None:
        tokens = _COMPLETION_TOKENS.search(self._tail)
        if tokens is None:
            self._run.failed("no usage")
            return
        self._run.answered(
            int(tokens[1]), (self._first_text_at or now) - self.sent_at, now - self.sent_at
        )

    def _close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()


async def run_load(
    spec: LoadSpec, on_window: Callable[[bool], None] = lambda is_open: None
) -> LoadResult:
    """Drive the load: warm up, open the window, close it.

    `on_window` is called when the window opens and closes.
    """
    run = _Run(spec)
    connections: dict[int, _Connection] = {}
    tasks = [
        asyncio.create_task(_keep_connected(run, connections, slot))
        for slot in range(spec.concurrency)
    ]
    # The parent process ends the window early by this signal.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, run.enough.set)
    await asyncio.sleep(spec.warmup_s)
    on_window(True)
    run.is_measuring, began = True, time.perf_counter()
    with contextlib.suppress(TimeoutError):  # the usual end: the window's time is over
        await asyncio.wait_for(run.enough.wait(), spec.duration_s)
    run.is_measuring, run.is_over = False, True
    now = time.perf_counter()
    on_window(False)
    run.result.duration_s = now - began
    run.result.num_stuck = sum(
        c.is_waiting and now - c.sent_at > _STUCK_S for c in connections.values()
    )
    for connection in connections.values():
        connection.abort()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return run.result


async def _keep_connected(run: _Run, connections: dict[int, _Connection], slot: int) -> None:
    loop = asyncio.get_running_loop()
    while not run.is_over:
        try:
            _, connection = await loop.create_connection(
                lambda: _Connection(run), run.spec.host, run.spec.port
            )
        except OSError as exc:
            run.failed(f"connect: {type(exc).__name__}")
            await asyncio.sleep(_RECONNECT_S)
            continue
        connections[slot] = connection
        await connection.closed.wait()


def chat_body(
    chat: str | Sequence[Mapping[str, str]],
    max_tokens: int,
    *,
    is_stream: bool,
    model: str = "default",
) -> str:
    """A chat request that runs to `max_tokens` and reports usage.

    `chat` is the list of messages, or the text of the only message.
    """
    body: dict[str, Any] = {  # the type is Any because it is a JSON document
        "model": model,
        "messages": [{"role": "user", "content": chat}] if isinstance(chat, str) else chat,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": is_stream,
    }
    if is_stream:
        body["stream_options"] = {"include_usage": True}
    return json.dumps(body)


def event_loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop if it is installed. It halves the CPU that the generator uses."""
    try:
        import uvloop
    except ImportError:
        return None
    return cast(Callable[[], asyncio.AbstractEventLoop], uvloop.new_event_loop)


def main(lines: Sequence[str]) -> None:
    """Run a generator process.

    It reads a LoadSpec from stdin. It prints "open" and "close" when the window opens and closes,
    and then the result.
    """

    def report(is_open: bool) -> None:
        print("open" if is_open else "close", flush=True)

    with asyncio.Runner(loop_factory=event_loop_factory()) as runner:
        result = runner.run(run_load(LoadSpec.from_json("".join(lines)), report))
    print(result.to_json(), flush=True)


if __name__ == "__main__":
    import sys

    main(sys.stdin.readlines())
