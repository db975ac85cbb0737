"""Clients that each send one request after another, and record the outcomes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

import httpx

from tests.support.streams import StreamOutcome, stream_completion

NUM_CLIENTS: Final = 6
HANGS_AFTER_S: Final = 60.0
_LONGEST_PROMPT: Final = 400
_CALM_S: Final = 0.05  # the pause after an incomplete answer, as of a client that backs off
_SHARED_SHARE: Final = 1 / 3  # the share of prompts that begin like an earlier one
_PATIENCE_S: Final = 0.3  # the mean time after which impatient clients give up


@dataclass(frozen=True, slots=True)
class Asked:
    """One request. `outcome` is None if its client gave up, or if it hung for HANGS_AFTER_S."""

    prompt: Sequence[int]
    max_tokens: int
    outcome: StreamOutcome | None
    gave_up: bool = False


class Clients:
    """`async with Clients(...)` runs clients that send requests until the block ends.

    `keys` are the API keys that the clients use.
    """

    def __init__(
        self, url: str, seed: int, keys: Sequence[str] = (), *, give_up_share: float = 0.0
    ) -> None:
        self._url, self._seed, self._give_up_share = url, seed, give_up_share
        shared = random.Random(f"shared {seed}")
        self._shared = [shared.randrange(40, 120) for _ in range(_LONGEST_PROMPT)]
        self._may_ask = asyncio.Event()
        self._may_ask.set()
        self._num_open = 0
        self._none_open = asyncio.Event()
        self._asked: list[Asked] = []
        self._tasks: list[asyncio.Task[None]] = []
        # Each request has its own connection, so that the kernel spreads requests over the
        # gateways.
        self._tenants = [
            httpx.AsyncClient(
                timeout=HANGS_AFTER_S,
                limits=httpx.Limits(max_keepalive_connections=0),
                headers={"authorization": f"Bearer {key}"} if key else {},
            )
            for key in keys or [""]
        ]

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._run(number)) for number in range(NUM_CLIENTS)]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(tenant.aclose() for tenant in self._tenants))

    @property
    def num_asked(self) -> int:
        """The number of requests that ended since the last `take`."""
        return len(self._asked)

    async def pause(self) -> None:
        """Stop sending requests, and return when the last one has ended."""
        self._may_ask.clear()
        while self._num_open:
            self._none_open.clear()
            await self._none_open.wait()

    def take(self) -> list[Asked]:
        """The requests that ended since the last `take`."""
        asked, self._asked = self._asked, []
        return asked

    def resume(self) -> None:
        self._may_ask.set()

    async def _run(self, number: int) -> None:
        draw = random.Random(f"client {self._seed} {number}")
        tenant = self._tenants[number % len(self._tenants)]
        while True:
            await self._may_ask.wait()
            prompt, max_tokens = self._draw_prompt(draw), draw.randrange(1, 50)
            if draw.random() < 0.15:
                max_tokens += 100
            gives_up = draw.random() < self._give_up_share
            patience_s = draw.expovariate(1 / _PATIENCE_S) if gives_up else HANGS_AFTER_S
            self._num_open += 1
            try:
                outcome = await self._ask(tenant, prompt, max_tokens, patience_s)
                gave_up = gives_up and outcome is None
                self._asked.append(Asked(prompt, max_tokens, outcome, gave_up))
            finally:
                self._num_open -= 1
                self._none_open.set()
            if outcome is None or not outcome.is_complete:
                await asyncio.sleep(_CALM_S)

    def _draw_prompt(self, draw: random.Random) -> list[int]:
        prompt = [draw.randrange(40, 120) for _ in range(draw.randrange(1, _LONGEST_PROMPT))]
        if draw.random() < _SHARED_SHARE:
            half = len(prompt) // 2
            prompt[:half] = self._shared[:half]
        return prompt

    async def _ask(
        self, tenant: httpx.AsyncClient, prompt: list[int], max_tokens: int, patience_s: float
    ) -> StreamOutcome | None:
        try:
            async with asyncio.timeout(patience_s):
                return await stream_completion(
                    tenant, self._url, prompt, max_tokens, ignore_eos=True
                )
        except TimeoutError:
            return None
