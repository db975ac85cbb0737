"""vLLM with a small cache loads evicted KV from tiers, and its outputs stay right.

A tier is a place for KV below the engine: the host pool, peers' pools, or files. The outputs must
equal those of plain vLLM, which is vLLM without the mesh. As a negative control, the comparison
must fail if the KV from the host pool is zeroed.
"""

from __future__ import annotations

import asyncio
import random
from array import array
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

import pytest
import pytest_asyncio

from pdmesh.engine.base import (
    Finished,
    KvPeer,
    Prefetch,
    Prefilled,
    PrefillJob,
    Sampling,
    Tokens,
)
from pdmesh.engine.vllm.config import VllmConfig
from pdmesh.kv.tiers.config import TierConfig
from pdmesh.kv.tiers.peers import FindHolders, PeerHolding
from tests.e2e.cases import VOCABULARY, Case, differences, generate_all
from tests.e2e.conftest import ASYNC_SCHEDULING, BLOCK_SIZE, Reference, prefill_config
from tests.e2e.pair import Host, Pair, running
from tests.fakes.tiny_llama import write_tiny_llama
from tests.support.waiting import until

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("default"),  # vLLM emits warnings
    pytest.mark.asyncio(loop_scope="session"),
]
POOL = TierConfig(host_pool_bytes=512 << 20, timeout_s=20.0)
SERVED_BY_POOL, SERVED_BY_FILES = ("host", "served"), ("file", "served")
LLAMA_BLOCK_BYTES = 4 * 2 * 32 * 128 * 4  # layers, KV heads of a rank, tokens, K and V, fp32
SERVED_BY_PEER = ("peer", "served")


@asynccontextmanager
async def tiny(
    model_dir: Path,
    tiers: TierConfig,
    failpoints: str = "",
    find_holders: FindHolders | None = None,
) -> AsyncIterator[Host]:
    """An engine whose cache holds one long prompt at a time."""
    config = replace(
        prefill_config(model_dir),
        instance_id="prefill-tiers",
        kv_cache_bytes=40 << 20,
        max_model_len=704,
        tiers=tiers,
        failpoints=failpoints,
    )
    async with running(config, find_holders) as host:
        assert host.info.num_kv_blocks < 16
        yield host


def long_prompts(reference: Reference) -> tuple[list[Case], list[list[int]]]:
    """The prompts with at least two full blocks, and the tokens that plain vLLM draws for them."""
    picked = [i for i, case in enumerate(reference.cases) if len(case.prompt) > 2 * BLOCK_SIZE]
    return [reference.cases[i] for i in picked], [reference.tokens[i] for i in picked]


def num_blocks(todo: list[Case]) -> int:
    """The number of full blocks, over all prompts, that need not be computed again.

    A block that several prompts share counts once for each prompt.
    """
    return sum((len(case.prompt) - 1) // BLOCK_SIZE for case in todo)


def block_ends(prompt: Sequence[int]) -> range:
    return range(BLOCK_SIZE, len(prompt) + 1, BLOCK_SIZE)


@pytest.mark.req("S76", "S77", "S78")
async def test_evicted_blocks_are_loaded_from_the_host_pool_and_outputs_stay_equal(
    pair: Pair, reference: Reference, model_dir: Path
) -> None:
    todo, expected = long_prompts(reference)
    assert num_blocks(todo) > 100
    async with tiny(model_dir, POOL) as host:
        run = Pair(host, pair.decode, salt="tiers")
        first = await generate_all(run.generate, todo, num_concurrent=1)
        assert differences(expected, first) == []
        before = dict(host.tier_counts)
        computed = host.engine.stats().extra["num_prompt_tokens_computed"]
        again = await generate_all(run.generate, todo, num_concurrent=2)
        assert differences(expected, again) == []
        await host.until(
            lambda: host.tier_counts.get(SERVED_BY_POOL, 0) - before.get(SERVED_BY_POOL, 0) > 0
        )
        served = host.tier_counts[SERVED_BY_POOL] - before.get(SERVED_BY_POOL, 0)
        stats = host.engine.stats().extra
        computed = stats["num_prompt_tokens_computed"] - computed
        num_tokens = sum(len(case.prompt) for case in todo)
        print(f"served {served} of {num_blocks(todo)} blocks, computed {computed} of {num_tokens}")
        assert served > num_blocks(todo) // 2, "the rest was still in the engine"
        assert computed <= num_tokens - BLOCK_SIZE * num_blocks(todo), (
            f"no block may count twice: {host.tier_counts}, {stats}"
        )
        assert host.pool_blocks, "announced"
        assert host.engine.stats().extra["num_kv_connections"] == 1, "the decode's"
        await host.until_idle()


@pytest.mark.req("S76", "S77", "S105", "S68")
async def test_a_new_engine_is_served_by_the_file_store(
    pair: Pair, reference: Reference, model_dir: Path, tmp_path: Path
) -> None:
    todo, expected = long_prompts(reference)
    todo, expected = todo[-8:], expected[-8:]
    tiers = replace(POOL, file_store_dir=str(tmp_path), file_store_bytes=4 << 30)
    async with tiny(model_dir, tiers) as host:
        run = Pair(host, pair.decode, salt="tiers")
        assert differences(expected, await generate_all(run.generate, todo, 1)) == []
        # A stopping engine writes files for only two more seconds, which is too short for a slow
        # disk.
        ends = {case.prompt[:end] for case in todo for end in block_ends(case.prompt)}
        await until(lambda: len(list(tmp_path.rglob("*.kv"))) >= len(ends))
    async with tiny(model_dir, tiers) as host:
        run = Pair(host, pair.decode, salt="tiers")
        # A lookup of files may take at most 50 ms. So a busy machine may miss the files of some
        # prompts.
        firsts = [await run.prefilled(case.prompt, Sampling(max_tokens=1)) for case in todo]
        assert any(
            first.num_cached_tokens == (len(case.prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE
            for case, first in zip(todo, firsts, strict=True)
        )
        assert differences(expected, await generate_all(run.generate, todo, 1)) == []
        await host.until(lambda: host.tier_counts.get(SERVED_BY_FILES, 0) > 0)
        await host.until_idle()


@pytest.mark.req("S68", "S80")
async def test_a_file_store_answers_nothing_for_another_models_weights(tmp_path: Path) -> None:
    """The other model is a fine-tune with the same layout, but other projections of K and V."""
    prompt = tuple(random.Random(31).choices(VOCABULARY, k=250))
    tiers = TierConfig(64 << 20, str(tmp_path / "files"), 1 << 30, timeout_s=20.0)
    original = VllmConfig(
        "original",
        1,
        write_tiny_llama(tmp_path / "original"),
        "tiny",
        dtype="float32",
        block_size=32,
        kv_cache_bytes=LLAMA_BLOCK_BYTES * 2 * 20,
        staging_bytes=0,
        landing_bytes=0,
        max_model_len=512,
        tiers=tiers,
        async_scheduling=ASYNC_SCHEDULING,
    )
    tuned = replace(original, model_dir=write_tiny_llama(tmp_path / "tuned", kv_seed=1))
    async with running(original) as host:
        first = await locally(Pair(host, host, salt="tiers"), prompt, 12)
        await until_stored(tmp_path / "files", len(prompt) // 32)
        original_name = host.info.model_fingerprint
    async with running(replace(tuned, instance_id="tuned")) as host:
        assert host.info.model_fingerprint != original_name
        run = Pair(host, host, salt="tiers")
        leg = run.next_leg(host)
        job = PrefillJob(leg, "r", 0, array("I", prompt), Sampling(max_tokens=1))
        host.engine.prefill(replace(job, cache_salt=run.root(), block_hashes=run.names(prompt)))
        prefilled = await host.next_output(leg)
        assert isinstance(prefilled, Prefilled)
        assert prefilled.num_cached_tokens == 0
        own = await locally(Pair(host, host, salt="that nobody used"), prompt, 12)
        assert await locally(run, prompt, 12) == own
        assert own != first


async def until_stored(files: Path, num_blocks: int) -> None:
    async with asyncio.timeout(60):
        while len(list(files.rglob("*.kv"))) < num_blocks:
            await asyncio.sleep(0.05)


@pytest.mark.nightly
@pytest.mark.req("S76", "S77", "S68")
async def test_the_host_pool_of_another_engine_serves_the_blocks_that_it_computed(
    pair: Pair, reference: Reference, model_dir: Path
) -> None:
    todo, expected = long_prompts(reference)
    picked = [i for i, case in enumerate(todo) if len(case.prompt) > 6 * BLOCK_SIZE]
    todo, expected = [todo[i] for i in picked], [expected[i] for i in picked]
    tiers = replace(POOL, uses_peers=True)
    async with tiny(model_dir, tiers) as first:

        async def find(names: Sequence[bytes], start: int) -> Sequence[PeerHolding]:
            count = sum(1 for _ in takewhile(first.pool_blocks.__contains__, names[start:]))
            return [PeerHolding("prefill-tiers", 1, first.info.kv_addresses, start, count)]

        assert (
            differences(
                expected,
                await generate_all(Pair(first, pair.decode, salt="tiers").generate, todo, 1),
            )
            == []
        )
        await first.until(lambda: len(first.pool_blocks) >= num_blocks(todo[-1:]))
        async with tiny(model_dir, tiers, find_holders=find) as second:
            run = Pair(second, pair.decode, salt="tiers")
            assert differences(expected, await generate_all(run.generate, todo, 1)) == []
            await second.until(lambda: second.tier_counts.get(SERVED_BY_PEER, 0) > 0)
            print(second.tier_counts, first.tier_counts)
            await second.until_idle()
        assert second.tier_counts[SERVED_BY_PEER] > num_blocks(todo) // 3, (
            "a shared block comes only once"
        )
        assert first.tier_counts["host", "lent"] >= second.tier_counts[SERVED_BY_PEER]
        await first.until_idle()


async def test_a_prefill_reuses_the_kv_of_an_answer_that_its_decode_drew(tmp_path: Path) -> None:
    """The prefill fetches the KV after the answer. In the next turn, it does not compute these
    blocks again.
    """
    prefill = VllmConfig(
        "prefill-answers",
        1,
        write_tiny_llama(tmp_path / "model"),
        "tiny",
        dtype="float32",
        block_size=32,
        kv_cache_bytes=LLAMA_BLOCK_BYTES * 2 * 20,
        staging_bytes=16 << 20,
        landing_bytes=16 << 20,
        max_model_len=512,
        tiers=TierConfig(64 << 20, timeout_s=20.0, uses_peers=True),
        async_scheduling=ASYNC_SCHEDULING,
    )
    prompt = tuple(random.Random(37).choices(VOCABULARY, k=70))
    sampling = Sampling(max_tokens=100, ignore_eos=True)
    decode = replace(prefill, instance_id="decode-answers")
    async with running(prefill) as first, running(decode) as second:
        run = Pair(first, second, salt="answers")
        answer = await run.generate(prompt, sampling)
        known = (*prompt, *answer[:-1])  # the last token has no KV yet
        names = run.names(known)[len(prompt) // 32 :]
        await second.until(lambda: second.pool_blocks.issuperset(names))
        peer = KvPeer("decode-answers", 1, tuple(second.info.kv_addresses))
        first.engine.prefetch(Prefetch(names, run.root(), peer, 1.0))
        await first.until(lambda: first.pool_blocks.issuperset(names))
        assert first.tier_counts["peer", "prefetched"] == len(names)

        later = (*known, answer[-1], *prompt[:20])
        turn = await run.prefilled(later, Sampling(max_tokens=8))
        assert turn.num_cached_tokens == len(known) // 32 * 32
        assert turn.ticket is not None
        drawn = await run.decoded(later, turn.token, turn.ticket, Sampling(max_tokens=8))
        fresh = Pair(first, second, salt="that nobody used")
        assert [turn.token, *drawn] == await fresh.generate(later, Sampling(max_tokens=8))
        await first.until_idle()
        await second.until_idle()


async def locally(run: Pair, prompt: tuple[int, ...], max_tokens: int) -> list[int]:
    host, leg = run.prefill, run.next_leg(run.prefill)
    job = PrefillJob(leg, "r", 0, array("I", prompt), Sampling(max_tokens=max_tokens))
    host.engine.prefill(replace(job, cache_salt=run.root(), block_hashes=run.names(prompt)))
    first = await host.next_output(leg)
    assert isinstance(first, Prefilled)
    tokens = [first.token]
    while not isinstance(output := await host.next_output(leg), Finished):
        assert isinstance(output, Tokens), output
        tokens += output.token_ids
    return tokens


async def until_served(host: Host, tier: tuple[str, str], num_blocks: int) -> None:
    await host.until(lambda: host.tier_counts.get(tier, 0) >= num_blocks)


@pytest.mark.nightly
@pytest.mark.req("S57", "S76")
async def test_two_ranks_load_the_same_blocks_each_from_its_own_pool_and_files(
    tmp_path: Path,
) -> None:
    rng = random.Random(23)
    prompts = [tuple(rng.choices(VOCABULARY, k=300 + n)) for n in range(6)]
    tiers = TierConfig(64 << 20, str(tmp_path / "files"), 1 << 30, timeout_s=20.0)
    config = VllmConfig(
        "ranks",
        1,
        write_tiny_llama(tmp_path / "model"),
        "tiny",
        dtype="float32",
        block_size=32,
        kv_cache_bytes=LLAMA_BLOCK_BYTES * 20,
        staging_bytes=0,
        landing_bytes=0,
        max_model_len=512,
        tensor_parallel_size=2,
        tiers=tiers,
        async_scheduling=ASYNC_SCHEDULING,
    )
    computed: list[list[int]] = []
    for tier in (SERVED_BY_POOL, SERVED_BY_FILES):  # the second engine has only the files
        async with running(config) as host:
            assert host.info.num_ranks == 2
            run = Pair(host, host, salt="tiers")
            computed = computed or [await locally(run, prompt, 6) for prompt in prompts]
            assert [await locally(run, prompt, 6) for prompt in prompts] == computed
            await until_served(host, tier, 28)
            await host.until_idle()
    assert len({path.parent.parent.parent for path in tmp_path.rglob("*.kv")}) == 2, "by rank"


@pytest.mark.nightly
@pytest.mark.req("S77")
async def test_the_comparison_fails_when_the_kv_from_the_pool_is_zeroed(
    pair: Pair, reference: Reference, model_dir: Path
) -> None:
    todo, expected = long_prompts(reference)
    picked = [i for i, case in enumerate(todo) if case.max_tokens >= 5]
    todo, expected = [todo[i] for i in picked], [expected[i] for i in picked]
    async with tiny(model_dir, POOL, "tier.loaded=zero-kv") as host:
        run = Pair(host, pair.decode, salt="tiers")
        await generate_all(run.generate, todo, 1)
        again = await generate_all(run.generate, todo, 1)
    assert len(differences(expected, again)) > len(todo) // 3


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def small(model_dir: Path) -> AsyncIterator[Host]:
    """One engine for the remaining tests."""
    async with tiny(model_dir, POOL) as host:
        yield host


@pytest.mark.req("S72", "S76")
async def test_a_local_job_is_served_from_the_pool_and_its_answer_is_stored_there(
    pair: Pair, reference: Reference, small: Host
) -> None:
    """With fusion, turn 2 of a chat also finds the evicted KV of turn 1's answer.

    The answer ends two tokens after the end of a block. With asynchronous scheduling, a block gets
    its name one step after it is complete.
    """
    fillers = [c.prompt for c in reference.cases if len(c.prompt) > 8 * BLOCK_SIZE]
    prompt = next(c for c in reference.cases if len(c.prompt) > 2 * BLOCK_SIZE).prompt
    run = Pair(small, pair.decode, salt="tiers")
    answer = await locally(run, prompt, 2 * BLOCK_SIZE + 2)
    turn2 = (*prompt, *answer, 5000, 6000, 7000)
    for filler in fillers[:3]:
        await run.prefilled(filler, Sampling(max_tokens=1))
    got = await locally(run, turn2, 8)
    num_named = (len(prompt) + len(answer) - 1) // BLOCK_SIZE
    await small.until(lambda: small.tier_counts.get(SERVED_BY_POOL, 0) >= num_named)
    other = Pair(small, pair.decode, salt="another")
    assert await locally(other, turn2, 8) == got, "as computed under an unused salt"
    await small.until_idle()


@pytest.mark.req("S49")
async def test_staged_blocks_return_to_the_engine_before_any_pull(pair: Pair, small: Host) -> None:
    """The staged prompts have more than twice as many blocks as the cache. The next prompt is
    computed as usual.
    """
    rng, run = random.Random(49), Pair(small, pair.decode, salt="nobody pulls")
    prompts = [tuple(rng.choices(VOCABULARY, k=8 * BLOCK_SIZE)) for _ in range(5)]
    assert 2 * small.info.num_kv_blocks < 5 * 8
    firsts = [await run.prefilled(prompt, Sampling(max_tokens=2)) for prompt in prompts]
    tickets = [first.ticket for first in firsts if first.ticket is not None]
    assert len(tickets) == len(small.tickets) == len(prompts), "no ticket was taken"
    assert len(await locally(run, prompts[0][::-1], 3)) == 3
    for ticket in tickets:
        small.engine.release(ticket.ticket_id)
    await small.until_idle()
