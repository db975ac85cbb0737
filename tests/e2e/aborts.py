"""Requests to a prefill and a decode that are aborted at random moments, beside other requests."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from pdmesh.engine.base import Prefilled, Sampling
from tests.e2e.pair import Pair

_SAMPLING = Sampling(max_tokens=8)


@asynccontextmanager
async def aborts_beside(pair: Pair, prompts: Sequence[Sequence[int]]) -> AsyncIterator[None]:
    """Send each prompt again and again, and abort it after a random time.

    If a load still wrote to blocks after its abort, it would corrupt the KV of other requests.
    """
    rng = random.Random(3)
    is_over = False

    async def disturb(prompt: Sequence[int]) -> None:
        while not is_over:
            leg = await pair.start_prefill(prompt, _SAMPLING)
            if rng.random() < 0.3:
                await asyncio.sleep(rng.random() * 0.1)
                pair.prefill.abort(leg)
                continue
            first = await pair.prefill.next_output(leg)
            if not (isinstance(first, Prefilled) and first.ticket):
                continue
            leg = await pair.start_decode(prompt, first.token, first.ticket, _SAMPLING)
            await asyncio.sleep(rng.random() * 0.1)
            pair.decode.abort(leg)
            pair.prefill.engine.release(first.ticket.ticket_id)

    tasks = [asyncio.create_task(disturb(prompt)) for prompt in prompts]
    try:
        yield
    finally:
        is_over = True
        await asyncio.gather(*tasks)
