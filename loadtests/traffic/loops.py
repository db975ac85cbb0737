"""Sends workloads to a real mesh over HTTP.

In an open loop, requests are sent at the times of the workload, however late answers are. In a
closed loop, users wait for their answers. Each request is a streamed completion of token ids. So
its length and its shared prefix are exactly those of the workload. `loadtests.traffic.replay
--ceiling` measures how much the generator itself can send, with a server of canned answers.
"""

from __future__ import annotations

import asyncio
import functools
import json
import math
import random
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from loadtests.traffic.workloads import Arrival

_TOKEN_IDS: Final = range(20, 200)  # ids of single-byte tokens in every vocabulary that we serve
_CACHED: Final = re.compile(rb'"cached_tokens": ?(\d+)')
_COMPLETION: Final = re.compile(rb'"completion_tokens": ?(\d+)')
_HAS_TEXT: Final = re.compile(rb'"(?:content|text)": ?"[^"]')
_PATH: Final = "/v1/completions"
_GIVE_UP_S: Final = 120.0


@dataclass(slots=True)
class Answer:
    """The answer to one request.

    Times are in seconds since the request was sent; inf if the answer did not get that far.
    `status` 0 means that there was no answer.
    """

    arrival: Arrival
    sent_at: float  # since the run began
    lag_s: float = 0.0  # how late the generator sent it
    status: int = 0
    ttft_s: float = math.inf
    e2e_s: float = math.inf
    num_tokens: int = 0
    num_cached_tokens: int = 0

    @property
    def is_answered(self) -> bool:
        return self.status == 200 and self.num_tokens > 0

    @property
    def tpot_s(self) -> float:
        return (self.e2e_s - self.ttft_s) / max(1, self.num_tokens - 1)


@dataclass(frozen=True, slots=True)
class Target:
    """The mesh that gets the requests.

    With `names_scenario`, each request names its scenario. The mesh must then have a group for each
    scenario.
    """

    host: str
    port: int
    block_size: int = 64
    model: str = "default"
    names_scenario: bool = False

    @classmethod
    def at(cls, url: str, *, block_size: int = 64, names_scenario: bool = False) -> Target:
        """The mesh at `url`. Raises ValueError if the URL has no host."""
        parts = urlsplit(url)
        if not parts.hostname:
            raise ValueError(f"{url}: it must look like http://127.0.0.1:8000")
        return cls(parts.hostname, parts.port or 80, block_size, names_scenario=names_scenario)

    def request(self, arrival: Arrival) -> bytes:
        body = json.dumps(
            {
                "model": self.model,
                "prompt": prompt_tokens(arrival, self.block_size),
                "max_tokens": arrival.num_output_tokens,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
                "chat_id": arrival.chat_id,
                **({"scenario": arrival.scenario} if self.names_scenario else {}),
            }
        ).encode()
        head = (
            f"POST {_PATH} HTTP/1.1\r\nhost: {self.host}\r\ncontent-type: "
            f"application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


def prompt_tokens(arrival: Arrival, block_size: int) -> list[int]:
    """The tokens of the prompt.

    A block name always gives the same tokens. The tokens after the named blocks are random.
    """
    tokens = [token for name in arrival.blocks for token in _block_tokens(name, block_size)]
    rng = random.Random(arrival.at_s)
    rest = arrival.num_prompt_tokens - len(tokens)
    return [*tokens, *rng.choices(_TOKEN_IDS, k=max(0, rest))]


@functools.lru_cache(maxsize=65_536)
def _block_tokens(name: bytes, block_size: int) -> tuple[int, ...]:
    return tuple(random.Random(name).choices(_TOKEN_IDS, k=block_size))


class Connections:
    """Connections that are kept alive. A new one is made only if none is idle."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def ask(self, answer: Answer) -> None:
        """Send the request and fill in its answer.

        The status is 0 if the connection broke or could not be made.
        """
        request = self._target.request(answer.arrival)
        try:
            reader, writer = await self._open()
        except OSError:
            return
        began = time.perf_counter()
        try:
            async with asyncio.timeout(_GIVE_UP_S):
                writer.write(request)
                is_reusable = await _read(reader, answer, began)
        except (OSError, asyncio.IncompleteReadError, TimeoutError):
            is_reusable = False
        if is_reusable:
            self._idle.append((reader, writer))
        else:
            writer.close()

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._idle:
            return self._idle.pop()
        return await asyncio.open_connection(self._target.host, self._target.port)

    def close(self) -> None:
        for _, writer in self._idle:
            writer.close()


async def _read(reader: asyncio.StreamReader, answer: Answer, began: float) -> bool:
    """Read the answer; returns whether the connection can be used again."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    status = int(head[9:12])
    length = re.search(rb"content-length: *(\d+)", head)
    if length is not None:
        await reader.readexactly(int(length[1]))
    else:
        await _read_events(reader, answer, began)
    answer.e2e_s = time.perf_counter() - began
    answer.status = status
    return b"connection: close" not in head


async def _read_events(reader: asyncio.StreamReader, answer: Answer, began: float) -> None:
    tail = b""
    while size := int((await reader.readline()).strip() or b"0", 16):
        chunk = (await reader.readexactly(size + 2))[:-2]
        if math.isinf(answer.ttft_s) and _HAS_TEXT.search(chunk):
            answer.ttft_s = time.perf_counter() - began
        tail = (tail + chunk)[-4096:]
    await reader.readline()
    tokens, cached = _COMPLETION.search(tail), _CACHED.search(tail)
    answer.num_tokens = int(tokens[1]) if tokens else 0
    answer.num_cached_tokens = int(cached[1]) if cached else 0


async def open_loop(
    target: Target, arrivals: Sequence[Arrival], on_answer: Callable[[Answer], None]
) -> list[Answer]:
    """Send each request at its own time, even if earlier requests are not answered."""
    connections, answers = Connections(target), []
    tasks: set[asyncio.Task[None]] = set()
    began = time.perf_counter()

    async def ask(answer: Answer) -> None:
        await connections.ask(answer)
        on_answer(answer)

    for arrival in arrivals:
        due = began + arrival.at_s
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        now = time.perf_counter()
        answer = Answer(arrival, now - began, lag_s=now - due)
        answers.append(answer)
        task = asyncio.create_task(ask(answer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    await asyncio.gather(*tasks)
    connections.close()
    return answers


async def closed_loop(
    target: Target,
    num_users: int,
    next_request: Callable[[], Arrival],
    *,
    think_s: Callable[[], float],
    duration_s: float,
) -> list[Answer]:
    """Let each user send a request, read the answer or the refusal, think, and begin again."""
    connections, answers = Connections(target), []
    began = time.perf_counter()

    async def user() -> None:
        await asyncio.sleep(think_s())
        while (now := time.perf_counter() - began) < duration_s:
            answer = Answer(next_request(), now)
            await connections.ask(answer)
            answers.append(answer)
            await asyncio.sleep(think_s())

    await asyncio.gather(*(user() for _ in range(num_users)))
    connections.close()
    return answers
