"""Runs the simulated engine with a tiny KV cache over the tiers: host pool, peers' pools and files.

Blocks that the engine evicts must come back from a tier, and answers must stay the same. The engine
draws tokens from the bytes in its memory, so a wrong byte anywhere on the way changes the answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pdmesh.core.instance.admission import Work
from pdmesh.core.kv.tier import Tier
from pdmesh.core.kv.tiers.load_plan import prefix_length
from pdmesh.core.kv.transfer.source_exclusions import ExcludedSource, KvSource, SourceFault
from pdmesh.engine.base import Sampling
from pdmesh.engine.factory import sim_params
from pdmesh.kv.tiers.config import TierConfig
from pdmesh.kv.tiers.peers import PeerHolding
from pdmesh.kv.tiers.report import TierEvent
from pdmesh.kv.tiers.stack import TierStack
from pdmesh.kv.transport.base import KvTransport
from pdmesh.kv.transport.ucx import UcxTransport
from pdmesh.v1 import instance_service_pb2 as pb
from tests.fakes.kv.memory_transport import MemoryTransport
from tests.fakes.sim_instances import (
    DECODE,
    FUSION,
    PREFILL,
    SimInstance,
    TestSession,
    generate,
    sim_instance,
)
from tests.support.sim_reference import sim_reference
from tests.support.sites.sim_pair import prompt_of
from tests.support.waiting import until

POOL = TierConfig(host_pool_bytes=4 << 20, timeout_s=20.0)
TINY: dict[str, Any] = {"num_kv_blocks": 12, "max_model_len": 640, "num_slots": 2}
SAMPLING = Sampling(max_tokens=20)
# Each prompt has 6 full blocks, and the engine has room for two prompts.
PROMPTS = [prompt_of(400, seed) for seed in range(8)]


@asynccontextmanager
async def tiered(
    name: str, works: frozenset[Work], make: Any, **changes: Any
) -> AsyncIterator[SimInstance]:
    """An instance that waits for any tier, even on a slow machine. It expects 10 s of computing for
    each block.
    """
    async with sim_instance(name, works, make, **TINY, **changes) as instance:
        stack_of(instance).costs.recompute_block_s = 10.0
        yield instance


def stack_of(instance: SimInstance) -> TierStack:
    queue = instance.engine._tiers
    assert queue is not None
    return queue.stack


def served(instance: SimInstance, tier: Tier) -> int:
    return stack_of(instance).counts.total(tier, TierEvent.SERVED)


async def locally(to: TestSession, prompt: list[int]) -> tuple[list[int], int]:
    """The tokens of the answer, and how many tokens of the prompt were cached."""
    leg = await to.prefill(prompt, SAMPLING, is_local=True)
    await leg.until("finished", "failed", "lost")
    assert leg.has("finished"), leg.heard[-1]
    first = leg.last("first_token")
    assert isinstance(first, pb.FirstToken)
    return [first.token_id, *leg.tokens], first.num_cached_tokens


@pytest.mark.req("S76", "S77", "S78", "S72")
async def test_evicted_blocks_come_back_from_the_host_pool(tmp_path: Path) -> None:
    async with tiered("fusion-0", FUSION, MemoryTransport, tiers=POOL) as i:
        async with TestSession(i) as to:
            for turn in range(2):
                for prompt in PROMPTS:
                    expected, _ = sim_reference(prompt, SAMPLING, sim_params(i.settings))
                    tokens, num_cached = await locally(to, prompt)
                    assert tokens == expected
                    assert num_cached == (384 if turn else 0)
            assert served(i, Tier.HOST) == 6 * len(PROMPTS)
        await i.until_idle()
        assert stack_of(i).pool.num_pinned == 0


@pytest.mark.req("S76", "S77", "S68", "S105")
async def test_a_new_instance_starts_with_the_blocks_of_the_file_store(tmp_path: Path) -> None:
    tiers = TierConfig(4 << 20, str(tmp_path), 1 << 30, timeout_s=20.0)
    async with (
        tiered("fusion-0", FUSION, MemoryTransport, tiers=tiers) as i,
        TestSession(i) as to,
    ):
        first = [await locally(to, prompt) for prompt in PROMPTS]
        files = stack_of(i).files
        assert files is not None
        # Closing does not wait long for writes, so the test waits here.
        await until(lambda: not files.num_waiting)
    async with tiered("fusion-1", FUSION, MemoryTransport, tiers=tiers) as i:
        async with TestSession(i) as to:
            second = [await locally(to, prompt) for prompt in PROMPTS]
        assert [tokens for tokens, _ in second] == [tokens for tokens, _ in first]
        assert [num_cached for _, num_cached in second] == [384] * len(PROMPTS)
        assert served(i, Tier.FILE) == 6 * len(PROMPTS)
        await i.until_idle()


@pytest.mark.req("S76", "S77")
async def test_prefill_hands_over_kv_that_came_from_a_tier() -> None:
    async with (
        tiered("prefill-0", PREFILL, MemoryTransport, tiers=POOL) as p,
        sim_instance("decode-0", DECODE, MemoryTransport, max_model_len=640) as d,
    ):
        async with TestSession(p) as to_p, TestSession(d) as to_d:
            for _ in range(2):
                for prompt in PROMPTS:
                    expected = sim_reference(prompt, SAMPLING, sim_params(p.settings))
                    assert await generate(to_p, to_d, prompt, SAMPLING) == expected
        assert served(p, Tier.HOST) == 6 * len(PROMPTS)
        await p.until_idle()
        await d.until_idle()


class Directory:
    """A stand-in for the index. It finds the blocks in the pool of `peer`. With `incarnation`, it
    reports another incarnation of the peer.
    """

    def __init__(self) -> None:
        self.peer: SimInstance | None = None
        self.incarnation: int | None = None

    async def find(self, names: Sequence[bytes], first: int) -> Sequence[PeerHolding]:
        if self.peer is None:
            return ()
        count = prefix_length(stack_of(self.peer).pool.held(names), first)
        incarnation = self.incarnation or self.peer.settings.incarnation
        address = self.peer.engine._agent.address
        name = self.peer.settings.instance_id
        return [PeerHolding(name, incarnation, (address,), first, count)] if count else ()


@pytest.mark.req("S76", "S77", "S68")
@pytest.mark.parametrize("make", [MemoryTransport, UcxTransport])
async def test_a_peers_host_pool_serves_what_it_computed(make: Callable[[], KvTransport]) -> None:
    directory = Directory()
    async with (
        tiered("fusion-0", FUSION, make, tiers=POOL) as a,
        tiered("fusion-1", FUSION, make, tiers=POOL, find_holders=directory.find) as b,
    ):
        async with TestSession(a) as to_a, TestSession(b) as to_b:
            directory.peer = a
            for prompt in PROMPTS:
                expected = await locally(to_a, prompt)
                assert expected[1] == 0
                assert await locally(to_b, prompt) == (expected[0], 384)
            assert served(b, Tier.PEER) == 6 * len(PROMPTS)
            assert stack_of(a).counts.total(Tier.HOST, TierEvent.LENT) == 6 * len(PROMPTS)
            for prompt in PROMPTS:
                await locally(to_b, prompt)
            assert served(b, Tier.HOST) == 6 * len(PROMPTS), "promoted to its own pool"
        await a.until_idle()
        await b.until_idle()
        for instance in (a, b):
            pool = stack_of(instance).pool
            await until(lambda pool=pool: pool.num_pinned == 0)


@pytest.mark.req("S77")
@pytest.mark.fault("F5")
async def test_a_peer_that_restarted_or_left_costs_a_bounded_wait(tmp_path: Path) -> None:
    directory = Directory()
    tiers = replace(POOL, timeout_s=3.0)
    async with tiered(
        "fusion-1", FUSION, UcxTransport, tiers=tiers, find_holders=directory.find
    ) as b:
        async with TestSession(b) as to_b:
            async with tiered("fusion-0", FUSION, UcxTransport, tiers=POOL) as a:
                async with TestSession(a) as to_a:
                    expected = [(await locally(to_a, prompt))[0] for prompt in PROMPTS]
                directory.peer, directory.incarnation = a, 12345
                assert await locally(to_b, PROMPTS[0]) == (expected[0], 0)
                directory.incarnation = None
                assert await locally(to_b, PROMPTS[1]) == (expected[1], 384)
            for prompt, tokens in zip(PROMPTS[2:4], expected[2:4], strict=True):
                assert await locally(to_b, prompt) == (tokens, 0), (
                    "the peer's address no longer answers"
                )
        await b.until_idle()
        await until(lambda: stack_of(b).num_loading == 0)
        assert stack_of(b).counts.total(Tier.PEER, TierEvent.FAILED) >= 12


@pytest.mark.req("S77")
@pytest.mark.fault("F34")
async def test_a_peer_whose_blocks_are_corrupt_three_times_is_ejected() -> None:
    """A corrupt fetch counts like a corrupt pull, so the instance ejects the peer after three."""
    directory = Directory()
    async with (
        tiered("fusion-0", FUSION, MemoryTransport, tiers=POOL) as a,
        tiered("fusion-1", FUSION, MemoryTransport, tiers=POOL, find_holders=directory.find) as b,
    ):
        async with TestSession(a) as to_a, TestSession(b) as to_b:
            expected = [(await locally(to_a, prompt))[0] for prompt in PROMPTS[:3]]
            pool = stack_of(a).pool
            for name in pool.names():
                (block,) = pool.pin([name])
                block.data[5] ^= 1
                pool.unpin([name], is_use=False)
            directory.peer = a
            for prompt, tokens in zip(PROMPTS, expected, strict=False):
                assert not b.host.excluded_sources()
                assert await locally(to_b, prompt) == (tokens, 0), "no block of it is used"
            source = KvSource("fusion-0", a.settings.incarnation)
            await until(
                lambda: b.host.excluded_sources() == [ExcludedSource(source, SourceFault.CORRUPT)]
            )
        await a.until_idle()
        await b.until_idle()


@pytest.mark.req("S77")
@pytest.mark.fault("F34")
async def test_answers_stay_right_although_blocks_in_the_tiers_are_corrupt(tmp_path: Path) -> None:
    """Every other file and every third block in memory has a flipped bit. The tiers must count
    these blocks and never use them, and the engine must compute them again.
    """
    tiers = TierConfig(4 << 20, str(tmp_path), 1 << 30, timeout_s=20.0)
    async with (
        tiered("fusion-0", FUSION, MemoryTransport, tiers=tiers) as i,
        TestSession(i) as to,
    ):
        for prompt in PROMPTS:
            await locally(to, prompt)
    for path in sorted(tmp_path.rglob("*.kv"))[::2]:
        content = bytearray(path.read_bytes())
        content[-100] ^= 4
        path.write_bytes(content)
    async with tiered("fusion-1", FUSION, MemoryTransport, tiers=tiers) as i:
        async with TestSession(i) as to:
            for turn in range(3):
                for prompt in PROMPTS:
                    expected, _ = sim_reference(prompt, SAMPLING, sim_params(i.settings))
                    tokens, _ = await locally(to, prompt)
                    assert tokens == expected
                if turn == 0:
                    pool = stack_of(i).pool
                    for name in pool.names()[::3]:
                        (block,) = pool.pin([name])
                        block.data[5] ^= 1
                        pool.unpin([name], is_use=False)
        counts = stack_of(i).counts
        assert counts.total(Tier.FILE, TierEvent.CORRUPT) > 0
        assert counts.total(Tier.HOST, TierEvent.CORRUPT) > 0
        assert counts.total(Tier.HOST, TierEvent.SERVED) > 0
        await i.until_idle()


@pytest.mark.req("S77")
async def test_requests_aborted_while_they_wait_for_a_tier_leave_nothing(tmp_path: Path) -> None:
    tiers = TierConfig(4 << 20, str(tmp_path), 1 << 30, timeout_s=20.0)
    async with tiered("prefill-0", PREFILL, MemoryTransport, tiers=tiers) as i:
        async with TestSession(i) as to:
            for prompt in PROMPTS:
                leg = await to.prefill(prompt, SAMPLING)
                first = await leg.until("first_token")
                await to.release(leg, first.ticket.ticket_id)
            for round_ in range(30):
                leg = await to.prefill(PROMPTS[round_ % len(PROMPTS)], SAMPLING)
                if round_ % 3:
                    await leg.until("accepted", "rejected")
                await to.abort(leg)
            await i.until_idle()
            tokens, _ = sim_reference(PROMPTS[0], SAMPLING, sim_params(i.settings))
            leg = await to.prefill(PROMPTS[0], SAMPLING)
            first = await leg.until("first_token")
            assert first.token_id == tokens[0]
            await to.release(leg, first.ticket.ticket_id)
        await i.until_idle()
        # A load under way may continue for a while.
        await until(lambda: stack_of(i).pool.num_pinned == 0)


@pytest.mark.req("S68", "S98")
async def test_the_host_pools_blocks_are_announced_as_such() -> None:
    async with tiered("fusion-0", FUSION, MemoryTransport, tiers=POOL) as i:
        async with TestSession(i) as to:
            for prompt in PROMPTS[:3]:
                await locally(to, prompt)
        pool = stack_of(i).pool
        snapshots: dict[str, set[bytes]] = {}

        async def look() -> bool:
            async with TestSession(i) as session:
                call = session._channel.unary_stream(
                    "/pdmesh.v1.InstanceService/GetKvSnapshot",
                    request_serializer=pb.GetKvSnapshotRequest.SerializeToString,
                    response_deserializer=pb.GetKvSnapshotResponse.FromString,
                )
                snapshots.clear()
                async for part in call(pb.GetKvSnapshotRequest()):
                    snapshots.setdefault(part.tier, set()).update(part.block_hashes)
            return snapshots.get("host") == set(pool.names())

        async with asyncio.timeout(60):
            while not await look():
                await asyncio.sleep(0.02)
        assert len(snapshots["host"]) >= 18
        assert len(snapshots[""]) <= 12, "blocks of the engine are announced separately"
