"""A prefill and a decode on the simulated engine in this process, and prompts for them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np

from pdmesh.kv.transport.base import KvTransport
from tests.fakes.kv.memory_transport import MemoryTransport
from tests.fakes.sim_instances import DECODE, PREFILL, SimInstance, TestSession, sim_instance

MakeTransport = Callable[[], KvTransport]


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = np.random.default_rng(seed * 10_007 + length)
    tokens: list[int] = rng.integers(3, 600, length).tolist()
    return tokens


@contextlib.asynccontextmanager
async def pair(
    make: MakeTransport = MemoryTransport, **changes: Any
) -> AsyncIterator[tuple[SimInstance, SimInstance, TestSession, TestSession]]:
    """A prefill, a decode, and a session to each. Both must be idle when the block ends."""
    async with (
        sim_instance("prefill-0", PREFILL, make, **changes) as p,
        sim_instance("decode-0", DECODE, make, **changes) as d,
    ):
        async with TestSession(p) as to_p, TestSession(d) as to_d:
            yield p, d, to_p, to_d
        await p.until_idle()
        await d.until_idle()
