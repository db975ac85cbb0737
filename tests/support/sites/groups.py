"""A mesh of blank instances, which have no role yet, and clients that send requests steadily."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from pathlib import Path

import httpx

from pdmesh.launcher.spec import MeshSpec
from tests.support.streams import StreamOutcome, stream_completion


def spec(groups_file: Path | None, num_blank: int, num_masters: int = 1) -> MeshSpec:
    return MeshSpec(
        engine="sim",
        num_prefill=0,
        num_decode=0,
        num_blank=num_blank,
        num_masters=num_masters,
        groups_file=groups_file,
        http_port=0,
        grpc_port=0,
        start_timeout_s=180,
    )


@contextlib.asynccontextmanager
async def asking(url: str) -> AsyncIterator[list[StreamOutcome]]:
    """Send requests until the block ends, and collect their outcomes.

    Four clients each send one request after another.
    """
    outcomes: list[StreamOutcome] = []
    is_over = asyncio.Event()

    async def ask(client: httpx.AsyncClient, seed: int) -> None:
        order = random.Random(seed)
        while not is_over.is_set():
            prompt = [40 + order.randrange(80) for _ in range(order.randrange(1, 300))]
            tokens = order.randrange(1, 40)
            outcomes.append(await stream_completion(client, url, prompt, tokens, ignore_eos=True))

    async with httpx.AsyncClient(timeout=60) as client, asyncio.TaskGroup() as clients:
        for seed in range(4):
            clients.create_task(ask(client, seed))
        try:
            yield outcomes
        finally:
            is_over.set()
