"""Runs the measurement of KV transfers.

Each round has every mode, size, transport, yardstick and peer once. So ratios compare measurements
of the same minute.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from loadtests.kv_bench import cases, yardsticks
from loadtests.kv_bench.movers import peers
from loadtests.kv_bench.pair import Pair, pair

_WIRE_BYTES: Final = 512 << 20  # bytes per wire measurement, in at most _WIRE_REPEATS messages
_WIRE_REPEATS: Final = 32
# repeats of transfers below 16 MiB, because a single one has too much noise
_QUICK_REPEATS: Final = 3


@dataclass(frozen=True, slots=True)
class Row:
    """The result of one measurement. A field is None if the mode does not have it."""

    round: int
    transport: str
    num_bytes: int
    mode: str
    total_ms: float
    visible_ms: float | None = None
    gather_ms: float | None = None
    wire_ms: float | None = None
    scatter_ms: float | None = None
    cpu_sender_ms: float | None = None
    cpu_receiver_ms: float | None = None
    block_ms: float | None = None
    block_p99_ms: float | None = None
    block_deviation_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    transports: Sequence[str]
    sizes: Sequence[int]
    rounds: int
    within_s: float  # no round begins after this time
    peers: Mapping[str, Path]  # the interpreter that has each library
    has_perftest: bool = True


def repeats_of(num_bytes: int) -> int:
    return max(1, min(_WIRE_REPEATS, _WIRE_BYTES // num_bytes))


def measure(plan: Plan, say: Callable[[str], None]) -> list[Row]:
    """The rows of all rounds except round 0.

    Round 0 checks the bytes, and warms up memory and connections.
    """
    rows: list[Row] = []
    ends = time.monotonic() + plan.within_s
    largest = max(plan.sizes)
    with ExitStack() as stack:
        pairs = {t: stack.enter_context(pair(t, largest)) for t in plan.transports}
        others = _start_peers(plan, largest, stack)
        for number in range(plan.rounds + 1):
            if number > 1 and time.monotonic() > ends:
                break
            for transport, both in pairs.items():
                for num_bytes in plan.sizes:
                    found = [
                        *_ours(both, num_bytes, number, transport),
                        *_yardsticks(plan, num_bytes, number, transport),
                        *_peers(others, num_bytes, number, transport),
                    ]
                    rows += found if number else []
            say(f"round {number} of {plan.rounds}")
    return rows


def _repeats(num_bytes: int, number: int) -> int:
    return _QUICK_REPEATS if num_bytes < 16 << 20 and number else 1


def _ours(both: Pair, num_bytes: int, number: int, transport: str) -> Iterator[Row]:
    for mode in cases.MODES:
        if mode in (cases.WIRE, cases.WIRE_EMPTY):
            both.run(mode, num_bytes)  # a warm-up, as perftest has
            sample = both.run(mode, num_bytes, repeats=repeats_of(num_bytes))
            yield Row(number, transport, num_bytes, mode, **asdict(sample))
            continue
        for _ in range(_repeats(num_bytes, number)):
            sample = both.run(mode, num_bytes, is_verified=number == 0)
            yield Row(number, transport, num_bytes, mode, **asdict(sample))


def _yardsticks(plan: Plan, num_bytes: int, number: int, transport: str) -> Iterator[Row]:
    yield Row(number, transport, num_bytes, "memcpy", yardsticks.memcpy_ms(num_bytes))
    if not number or not plan.has_perftest:
        return
    for wait in yardsticks.WAITS:
        ms = yardsticks.perftest_ms(transport, num_bytes, repeats_of(num_bytes), wait)
        if ms is not None:
            yield Row(number, transport, num_bytes, f"perftest_{wait}", ms)


def _start_peers(plan: Plan, largest: int, stack: ExitStack) -> dict[tuple[str, str], peers.Peer]:
    found: dict[tuple[str, str], peers.Peer] = {}
    for name, python in plan.peers.items():
        for transport in peers.TRANSPORTS_OF[name]:
            if transport in plan.transports:
                peer = peers.Peer(name, python, transport, largest)
                stack.callback(peer.close)
                found[name, transport] = peer
    return found


def _peers(
    others: Mapping[tuple[str, str], peers.Peer], num_bytes: int, number: int, transport: str
) -> Iterator[Row]:
    for (name, its_transport), peer in others.items():
        for kind in peers.KINDS_OF[name] if its_transport == transport else ():
            for _ in range(_repeats(num_bytes, number)):
                ms = peer.run_ms(kind, num_bytes)
                if ms is not None:
                    yield Row(number, transport, num_bytes, f"{name}_{kind}", ms)
