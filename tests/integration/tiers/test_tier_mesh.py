"""Runs two prefill processes with host pools, which hold KV blocks in host memory. The
kv-cache-index tells each prefill which blocks the other one holds.
"""

from __future__ import annotations

import itertools
import re
import signal

import numpy as np
import pytest

from pdmesh.core.kv.tier import Tier
from pdmesh.engine.base import Sampling
from pdmesh.engine.sim.model import SimParams
from pdmesh.net.grpc import rpc
from pdmesh.v1 import instance_service_pb2 as pb
from pdmesh.v1 import kv_index_service_pb2 as pb_index
from pdmesh.v1.kv_index_service_pb2_grpc import KvIndexServiceStub
from tests.fakes.sim_instances import TestSession
from tests.support.sim_reference import sim_reference
from tests.support.sites.instance_site import Process, Site, site
from tests.support.waiting import until

__all__ = ["site"]  # pytest finds the fixture under this name

# The blocks have 64 tokens. The rest of the prompt fills no block.
NUM_TOKENS, NUM_BLOCKS = 1500, 23
SAMPLING = Sampling(max_tokens=4)
# Computing takes as long as on a real engine, so that fetching pays. The blocks of the simulated
# engine are small, and 4 MB hold 500 of them.
PREFILL = {"KV_HOST_POOL_BYTES": str(4 << 20), "SIM_LAW": "smollm2-cpu", "KV_TIER_TIMEOUT_S": "10"}


def prompt_of(seed: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(3, 600, NUM_TOKENS).tolist()
    return tokens


async def prefilled(process: Process, prompt: list[int]) -> pb.FirstToken:
    """Compute the prompt at the prefill, assert that token 1 is correct, and release the staged
    KV.
    """
    params = SimParams(block_size=process.record.block_size)
    async with TestSession(process) as session:
        leg = await session.prefill(prompt, SAMPLING)
        first = await leg.until("first_token", timeout_s=60.0)
        assert isinstance(first, pb.FirstToken)
        assert [first.token_id] == sim_reference(prompt, SAMPLING, params)[0][:1]
        await session.release(leg, first.ticket.ticket_id)
    return first


def blocks(process: Process, tier: str, event: str) -> int:
    """The prefill's count of blocks for this tier and event, from /metrics."""
    for line in process.metrics().splitlines():
        if line.startswith("pdmesh_kv_tier_blocks_total") and {
            f'tier="{tier}"',
            f'event="{event}"',
        } <= set(re.split("[{},]", line)):
            return int(float(line.rsplit(" ", 1)[1]))
    return 0


async def is_indexed(index: KvIndexServiceStub, process: Process, num_blocks: int) -> bool:
    """Whether the index knows `num_blocks` blocks of this prefill's host pool."""
    asked = pb_index.SnapshotRequest(instance_ids=[process.record.instance_id])
    call = index.Snapshot(asked)
    parts = [part async for part in call]  # type: ignore[attr-defined]  # the stub's word is sync
    return sum(len(p.block_hashes) for p in parts if p.tier == Tier.HOST) >= num_blocks


@pytest.mark.req("S68", "S76", "S77", "S106")
async def test_a_prefill_is_served_by_the_pool_of_another_until_that_one_is_gone(
    site: Site,
) -> None:
    index = await site.start("kv_cache_index", "index-0")
    first = await site.start("prefill", "prefill-0", **PREFILL)
    second = await site.start("prefill", "prefill-1", **PREFILL)
    last = prompt_of(0)
    assert (await prefilled(first, last)).num_cached_tokens == 0
    await until(lambda: blocks(first, "host", "stored") == NUM_BLOCKS)
    seeds = itertools.count(1)

    async def is_fetched() -> bool:
        """Whether the second prefill fetches a prompt's blocks from the first. The first connection
        takes some time.
        """
        prompt = prompt_of(seed := next(seeds))
        assert (await prefilled(first, prompt)).num_cached_tokens == 0
        async with rpc.channel(index.address) as channel:
            stub = KvIndexServiceStub(channel)
            await until(lambda: is_indexed(stub, first, NUM_BLOCKS * (seed + 1)))
        return (await prefilled(second, prompt)).num_cached_tokens == 64 * NUM_BLOCKS

    await until(is_fetched)
    await until(lambda: blocks(second, "peer", "served") >= NUM_BLOCKS)
    await until(lambda: blocks(first, "host", "lent") >= NUM_BLOCKS)

    first.signal(signal.SIGKILL)
    await first.exit_code()
    assert (await prefilled(second, last)).num_cached_tokens == 0, (
        "the prompt was computed in bounded time"
    )
    assert (await prefilled(second, last)).num_cached_tokens == 64 * NUM_BLOCKS
