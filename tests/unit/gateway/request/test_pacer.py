"""A fast stream is written at most once per interval. A slow stream is never delayed."""

from __future__ import annotations

import asyncio
import time

from pdmesh.services.gateway.request.pacer import PacedWaiter, Pacer


def call_with(interval_s: float) -> PacedWaiter:
    return PacedWaiter(Pacer(interval_s))


async def woken_within(call: PacedWaiter, limit_s: float) -> bool:
    try:
        await asyncio.wait_for(call.changed(), limit_s)
    except TimeoutError:
        return False
    return True


async def test_the_first_token_wakes_the_writer_at_once() -> None:
    call = call_with(interval_s=60.0)
    call.on_tokens()
    assert await woken_within(call, 60.0)


async def test_the_next_tokens_wait_for_the_interval_and_come_together() -> None:
    suspected = call_with(interval_s=600.0)
    suspected.on_tokens()
    assert await woken_within(suspected, 60.0)
    suspected.on_tokens()
    assert not await woken_within(suspected, 0.1), "the interval was not over yet"
    call = call_with(interval_s=0.05)
    call.on_tokens()
    assert await woken_within(call, 60.0)
    for _ in range(10):
        call.on_tokens()
    assert await woken_within(call, 60.0)
    assert not await woken_within(call, 0.1), "ten tokens woke the writer more than once"


async def test_an_end_is_sent_at_once_even_if_tokens_are_held_back() -> None:
    call = call_with(interval_s=60.0)
    call.on_tokens()
    assert await woken_within(call, 60.0)
    call.on_tokens()
    call.on_news()
    assert await woken_within(call, 60.0)


async def test_a_token_after_the_interval_is_not_delayed() -> None:
    """The token wakes the writer in the same turn of the event loop. A timer would need another
    turn.
    """
    call = call_with(interval_s=0.5)
    call.on_tokens()
    assert await woken_within(call, 60.0)
    woken_at = time.monotonic()
    writer = asyncio.create_task(call.changed())
    while time.monotonic() - woken_at < 0.55:
        await asyncio.sleep(0.05)
    call.on_tokens()
    await asyncio.sleep(0)
    assert writer.done()


async def test_without_an_interval_nothing_is_held_back() -> None:
    call = call_with(interval_s=0.0)
    for _ in range(3):
        call.on_tokens()
        assert await woken_within(call, 60.0)


async def test_one_timer_wakes_all_waiting_writers() -> None:
    pacer = Pacer(0.01)
    woken: list[str] = []
    done = asyncio.Event()
    pacer.later(lambda: woken.append("a"))
    pacer.later(lambda: woken.append("b"))
    pacer.later(done.set)
    await asyncio.wait_for(done.wait(), 60.0)
    assert woken == ["a", "b"]
    done.clear()
    pacer.later(done.set)
    await asyncio.wait_for(done.wait(), 60.0)
