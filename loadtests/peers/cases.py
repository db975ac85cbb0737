"""The requests that each stack gets, and the numbers that are read from its answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

PATH: Final = "/v1/chat/completions"
_ASKED: Final = (
    "Tell me in a few words what you think of the weather in Paris today, and why people like it."
)


@dataclass(frozen=True, slots=True)
class Load:
    """The result of one window, as the generator measured it.

    Times are in ms. `num_events` counts events of streams. An event may have several tokens.
    """

    num_ok: int
    num_failed: int
    num_events: int
    seconds: float
    latency_p50_ms: float
    latency_p99_ms: float
    ttft_p50_ms: float
    ttft_p99_ms: float

    @property
    def requests_per_s(self) -> float:
        return self.num_ok / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True)
class Turn:
    """One case at one stack in one round. `cpu_s` is the CPU of all the stack's processes."""

    stack: str
    case: str
    load: Load
    cpu_s: float

    @property
    def cpu_ms_per_request(self) -> float:
        return 1e3 * self.cpu_s / self.load.num_ok if self.load.num_ok else float("inf")


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of load: `connections` clients, each with one request at a time."""

    name: str
    max_tokens: int
    is_stream: bool
    connections: int

    @property
    def body(self) -> str:
        asked = {
            "model": "default",
            "messages": [{"role": "user", "content": _ASKED}],
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "stream": self.is_stream,
            "ignore_eos": True,
        }
        return json.dumps(asked)


@dataclass(frozen=True, slots=True)
class Measure:
    """A row of the table: a number of a case's turn.

    `bar` is the bar for the ratio of ours to Dynamo's.
    """

    name: str
    case: Case
    read: Callable[[Turn], float]
    form: str
    bar: float | None = None  # for the ratio ours / Dynamo
    is_more_better: bool = True


ONE: Final = Case("1 token", 1, False, 64)
EIGHT: Final = Case("8 tokens", 8, False, 64)
STREAMS: Final = Case("streams of 128 tokens", 128, True, 64)
LONE: Final = Case("a lone stream of 2 tokens", 2, True, 1)
CASES: Final = (ONE, EIGHT, STREAMS, LONE)
WARM_UP: Final = Case("warm-up", 1, False, 16)


def _rate(turn: Turn) -> float:
    return turn.load.requests_per_s


MEASURES: Final = (
    Measure("requests/s, 1 token, 64 connections", ONE, _rate, ",.0f", 2.0),
    Measure("requests/s, 8 tokens, 64 connections", EIGHT, _rate, ",.0f", 2.0),
    Measure("streams/s of 128 tokens, 64 connections", STREAMS, _rate, ",.0f", 2.0),
    Measure(
        "TTFT p50 of a lone stream, ms",
        LONE,
        lambda turn: turn.load.ttft_p50_ms,
        ".2f",
        0.5,
        is_more_better=False,
    ),
    Measure(
        "TTFT p99 of a lone stream, ms",
        LONE,
        lambda turn: turn.load.ttft_p99_ms,
        ".1f",
        0.3,
        is_more_better=False,
    ),
    *(
        Measure(
            f"CPU ms per request, {case.name}",
            case,
            lambda turn: turn.cpu_ms_per_request,
            ".2f",
            0.5,
            is_more_better=False,
        )
        for case in (ONE, EIGHT, STREAMS)
    ),
)
