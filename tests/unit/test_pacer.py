"""A stream whose tokens come fast is written to at most once in an interval; a slow one is never delayed."""

from __future__ import annotations

import asyncio
import time

import pytest
from opentelemetry.trace import INVALID_SPAN

from services.gateway.frontend import Call
from services.gateway.pacer import Pacer
from services.gateway.spec import CallSpec, SamplingSpec


def call_with(interval_s: float) -> Call:
    spec = CallSpec("chat", "m", prompts=(), sampling=SamplingSpec())
    return Call("req-1", spec, INVALID_SPAN, Pacer(interval_s))


async def woken_within(call: Call, limit_s: float) -> bool:
    try:
        await asyncio.wait_for(call.changed(), limit_s)
    except TimeoutError:
        return False
    return True


async def test_the_first_token_wakes_the_writer_at_once() -> None:
    call = call_with(interval_s=60.0)
    call.on_tokens()
    assert await woken_within(call, 10.0)


async def test_the_next_tokens_wait_for_the_interval_and_come_together() -> None:
    call = call_with(interval_s=0.05)
    call.on_tokens()
    assert await woken_within(call, 10.0)
    woken_at = time.monotonic()
    for _ in range(10):
        call.on_tokens()
    assert await woken_within(call, 10.0)
    assert time.monotonic() - woken_at >= 0.045
    assert not await woken_within(call, 0.1), "ten tokens woke the writer more than once"


async def test_an_end_is_told_at_once_though_tokens_are_held_back() -> None:
    call = call_with(interval_s=60.0)
    call.on_tokens()
    assert await woken_within(call, 10.0)
    call.on_tokens()
    call.on_news()
    assert await woken_within(call, 10.0)


@pytest.mark.alone
async def test_a_token_after_the_interval_is_not_delayed() -> None:
    call = call_with(interval_s=0.5)
    call.on_tokens()
    assert await woken_within(call, 10.0)
    await asyncio.sleep(0.55)
    call.on_tokens()
    began = time.monotonic()
    assert await woken_within(call, 10.0)
    assert time.monotonic() - began < 0.45


async def test_without_an_interval_nothing_is_held_back() -> None:
    call = call_with(interval_s=0.0)
    for _ in range(3):
        call.on_tokens()
        assert await woken_within(call, 10.0)


async def test_one_timer_wakes_all_that_wait() -> None:
    pacer = Pacer(0.01)
    woken: list[str] = []
    done = asyncio.Event()
    pacer.later(lambda: woken.append("a"))
    pacer.later(lambda: woken.append("b"))
    pacer.later(done.set)
    await asyncio.wait_for(done.wait(), 10.0)
    assert woken == ["a", "b"]
    done.clear()
    pacer.later(done.set)
    await asyncio.wait_for(done.wait(), 10.0)
