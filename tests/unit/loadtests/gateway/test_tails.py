"""The reports of the benches for long prompts and for a lone stream."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from dataclasses import replace

import pytest

from loadtests.gateway import lone_stream, prompt_cost
from loadtests.gateway.lone_stream import ALONE, GREEDY, OURS, PASSED, STEADY, Loads, Stack, Turn
from loadtests.gateway.prompt_cost import Bounds, Library, Round, Sample
from loadtests.harness import client
from loadtests.harness.canned import _Canned
from loadtests.harness.client import LoadResult, LoadSpec, chat_body

SAMPLE = Sample("new", 60_000, 10.0, 50.0, 200.0, 5.0, 1.5)


@pytest.mark.parametrize(
    ("loop_ms", "others_ms", "num_cores", "per_s"),
    [
        (18.0, 50.0, 64, 50.0),  # limited by the loop and the lock, with any number of cores
        (5.0, 60.0, 4, 2000 / 60),  # limited by the two threads for long texts
        (5.0, 5.0, 1, 100.0),  # limited by the single core
    ],
)
def test_a_gateway_takes_what_its_narrowest_part_takes(
    loop_ms: float, others_ms: float, num_cores: int, per_s: float
) -> None:
    sample = replace(SAMPLE, loop_ms=loop_ms, others_ms=others_ms)
    assert Bounds(num_cores, 2.0, sample).per_s == pytest.approx(per_s)


def test_threads_are_told_apart_by_what_they_spent() -> None:
    spent = prompt_cost._spent({1: 5.0, 2: 1.0, 3: 1.0}, {1: 5.5, 2: 1.2, 4: 0.3}, first=1)
    assert spent == pytest.approx((0.5, 0.5)), "a thread that has ended tells nothing"


def test_a_bar_is_judged_by_the_median_of_the_rounds() -> None:
    def one(loop_ms: float, long_ms: float) -> Round:
        short = replace(SAMPLE, loop_ms=loop_ms)
        long = replace(SAMPLE, loop_ms=long_ms, others_ms=0.0)
        return Round([short, long, SAMPLE, SAMPLE], [Library(40.0, 2.0), Library(70.0, 3.0)])

    text = prompt_cost.as_markdown([one(8.0, 90.0), one(9.0, 99.0), one(98.0, 300.0)], 8)
    assert "| 91 (10..100) | >= 60: met |" in text
    assert "| 0.099 (0.090..0.300) | <= 0.1: met |" in text
    worse = prompt_cost.as_markdown([one(18.0, 101.0)], 8)
    assert worse.count("**not met**") == 2


def result(*ttfts_ms: float) -> LoadResult:
    found = LoadResult(num_requests=len(ttfts_ms), duration_s=1.0)
    for each in ttfts_ms:
        found.ttft.record(each / 1e3)
        found.gaps.record(each / 1e3)
    return found


def turn(situation: str, stack: str, ttfts_ms: Sequence[float]) -> Turn:
    return Turn(situation, stack, result(*ttfts_ms), 7.0, {"gateway-0": 1.5}, {"0": (2.0, 0.01)})


def test_the_longest_of_few_is_in_the_tail_and_not_in_the_median() -> None:
    p50, p99, p999, longest = turn(ALONE, OURS, [1.0] * 1990 + [50.0] * 10).values["TTFT"]
    assert [p50, p99] == pytest.approx([1.0, 1.0], rel=0.01)
    assert [p999, longest] == pytest.approx([50.0, 50.0], rel=0.01)


def test_a_ratio_is_that_of_one_round() -> None:
    turns = [
        turn(situation, stack, [slow * (2.0 if stack == OURS else 1.0) * busy])
        for slow in (1.0, 10.0, 3.0)  # how slow the machine is in each round
        for situation, busy in ((ALONE, 1.0), (STEADY, 4.0))
        for stack in (OURS, PASSED)
    ]
    text = lone_stream.as_markdown(turns, Loads((), 3.0, (), 1.0))
    # The longest time is exact. Quantiles are rounded to buckets.
    for row, ratio in (
        (f"{ALONE} | ours / passthrough", 2.0),
        (f"{STEADY} | {OURS}, beside / alone", 4.0),
    ):
        (line, _) = (each for each in text.splitlines() if each.startswith(f"| {row} |"))
        assert line.endswith(f" | {ratio:.2f} ({ratio:.2f}..{ratio:.2f}) |")
    assert f"| {ALONE} | 6, 5.0 ms | none | none | 1.5 (1.5..1.5) | 0.0" in text


def test_collections_of_a_turn_are_those_between_two_looks() -> None:
    def page(count: int, seconds: float) -> str:
        label = '{generation="1",otel_scope_name="pdmesh"}'
        name = "pdmesh_process_gc_pause_seconds"
        return f"# HELP\n{name}_count{label} {count}.0\n{name}_sum{label} {seconds}\n"

    grown = lone_stream._collections(page(2, 0.5), page(5, 0.75))
    assert grown == {"1": (3.0, 0.25)}
    assert lone_stream._collections("", page(1, 0.5)) == {"1": (1.0, 0.5)}


def test_only_the_load_beside_differs_between_situations() -> None:
    loads, stack = Loads(("short",), 30.0, ("long",), 2.0), Stack(OURS, 1)
    assert loads.beside(ALONE, stack, 9.0) is None
    steady, greedy = loads.beside(STEADY, stack, 9.0), loads.beside(GREEDY, stack, 9.0)
    assert steady is not None
    assert greedy is not None
    assert (steady.bodies, steady.rate_per_s) == (("short",), 30.0)
    assert (greedy.bodies, greedy.rate_per_s, greedy.concurrency) == (("long",), 2.0, 1)


@pytest.mark.parametrize("pause_s", [0.0, 0.001])
async def test_an_open_loop_asks_as_often_as_its_times_say_and_ends_on_a_signal(
    pause_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The times between requests are random. In this test they are all equal."""
    monkeypatch.setattr("random.expovariate", lambda rate: 1 / rate)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Canned(pause_s), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    body = chat_body("hello", 3, is_stream=True)
    spec = LoadSpec("127.0.0.1", port, "/", (body,), 2, 0.0, 60.0, rate_per_s=40.0)
    running = asyncio.create_task(client.run_load(spec))
    loop.call_later(1.0, signal.raise_signal, signal.SIGTERM)
    found = await running
    server.close()
    assert not found.errors
    assert found.num_tokens == 3 * found.num_requests
    assert 0 < found.num_requests <= 40 * found.duration_s + 2, "an answer brings no request"
