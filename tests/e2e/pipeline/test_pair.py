"""A prefill and a decode of two pipeline stages each draw the right tokens.

The answers must equal those of plain vLLM, which is vLLM without the mesh, on one rank. A stage has
half of the model's layers in its own process. It pulls KV from the same stage of the other side.
While one stage computes a step, the other computes the step before.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
import pytest_asyncio

from pdmesh.core.kv.layout.compatibility import parse
from pdmesh.core.sampling.logit_shaping import LogitShaping
from pdmesh.core.speculation.proposal_length import Speculation
from pdmesh.engine.base import KvPeer, Sampling
from pdmesh.engine.vllm.config import VllmConfig
from pdmesh.errors import EngineFailed, EngineMisconfigured, KvTransferFailed
from pdmesh.kv.tiers.config import TierConfig
from tests.e2e.aborts import aborts_beside
from tests.e2e.cases import VOCABULARY, Case, differences, generate_all
from tests.e2e.conftest import Plain, plain_vllm
from tests.e2e.mesh import test_ranks as ranks
from tests.e2e.mesh.test_ranks import BLOCK_SIZE
from tests.e2e.pair import Host, LegFailed, Pair, locally, running
from tests.fakes.tiny_llama import HEAD_DIM, NUM_KV_HEADS, NUM_LAYERS, write_tiny_llama
from tests.support.sites.processes import is_alive
from tests.support.waiting import until

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.nightly,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("default"),  # vLLM emits warnings
    pytest.mark.asyncio(loop_scope="module"),
]
NUM_STAGES: Final = 2
POOL: Final = TierConfig(host_pool_bytes=64 << 20, timeout_s=20.0)
TOKEN_BYTES: Final = NUM_LAYERS * 2 * NUM_KV_HEADS * HEAD_DIM * 4  # K and V, in float32
NO_ARENAS: Final = {"staging_bytes": 0, "landing_bytes": 0}
SHAPINGS: Final = {
    "seed": LogitShaping(),
    "penalties": LogitShaping(repetition_penalty=1.3, frequency_penalty=0.4),
    "words": LogitShaping(min_tokens=9, bad_words=((1234,), (1235, 1236))),
}
NUM_CONCURRENT: Final = 6  # enough requests for a batch in each stage


def stage_cases(seed: int = 5) -> list[Case]:
    """Prompts whose lengths lie around blocks.

    One prompt takes several steps, and two answers are drawn with a seed.
    """
    rng = random.Random(seed)
    lengths = [1, 31, 32, 33, 64, 200, 700, *(rng.randint(2, 160) for _ in range(9))]
    todo = [Case(tuple(rng.choices(VOCABULARY, k=n)), rng.choice((2, 5, 20))) for n in lengths]
    return [*todo, *(replace(case, temperature=0.8, seed=7, max_tokens=12) for case in todo[-2:])]


def config(model_dir: Path, instance_id: str, incarnation: int, **more: Any) -> VllmConfig:
    base = ranks.config(model_dir, instance_id, incarnation)
    return replace(base, tensor_parallel_size=1, pipeline_parallel_size=NUM_STAGES, **more)


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="module")
def plain(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plain]:
    with plain_vllm(
        tiny_llama,
        stage_cases(),
        tmp_path_factory.mktemp("plain"),
        block_size=BLOCK_SIZE,
        max_model_len=1024,
        kv_cache_memory_bytes=64 << 20,
    ) as plain:
        yield plain


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stages(tiny_llama: Path, plain: Plain) -> AsyncIterator[Pair]:
    async with (
        running(config(tiny_llama, "prefill-0", 1, tiers=POOL)) as prefill,
        running(config(tiny_llama, "decode-0", 2)) as decode,
    ):
        yield Pair(prefill, decode)


async def idle(*hosts: Host) -> None:
    for host in hosts:
        await host.until_idle()


@pytest.mark.req("S120", "S1", "S48")
async def test_two_stages_hand_over_to_two_stages_whole_and_per_layer(
    stages: Pair, plain: Plain
) -> None:
    todo, expected = plain.decided(stage_cases())
    assert stages.prefill.info.num_ranks == NUM_STAGES
    kind = parse(stages.prefill.info.model_fingerprint)
    assert kind is not None
    assert kind.stages == (NUM_LAYERS // NUM_STAGES,) * NUM_STAGES
    assert stages.decode.info.model_fingerprint == stages.prefill.info.model_fingerprint
    for salt in ("whole", "layers"):
        run = Pair(stages.prefill, stages.decode, salt=salt)
        generate = run.generate if salt == "whole" else run.generate_per_layer
        got = await generate_all(generate, todo, NUM_CONCURRENT)
        assert differences(expected, got) == []
        assert run.num_computed_at_decode == 0
        assert run.num_handed_over == sum(case.max_tokens > 1 for case in todo)
    await idle(stages.prefill, stages.decode)


@pytest.mark.req("S120", "S49")
@pytest.mark.fault("F27")
async def test_aborts_while_chunks_are_in_several_steps_harm_no_other_request(
    stages: Pair, plain: Plain
) -> None:
    todo, expected = plain.decided(stage_cases())
    rng = random.Random(12)
    aborted = [rng.choices(VOCABULARY, k=n) for n in (150, 400, 700, 900)]  # up to four chunks
    run = Pair(stages.prefill, stages.decode, salt="aborts")
    async with aborts_beside(run, aborted):
        for generate in (run.generate, run.generate_per_layer):
            assert differences(expected, await generate_all(generate, todo, NUM_CONCURRENT)) == []
    await idle(stages.prefill, stages.decode)


@pytest.mark.req("S120")
async def test_preempted_decodes_draw_the_same_tokens(stages: Pair, tiny_llama: Path) -> None:
    """Eight prompts of one block each grow to three blocks, and the cache has six. The expected
    answers are those of a decode with room for all. A test above compares such answers with plain
    vLLM's.
    """
    rng = random.Random(14)
    prompts = [tuple(rng.choices(VOCABULARY, k=BLOCK_SIZE - 4)) for _ in range(8)]
    todo = [Case(prompt, BLOCK_SIZE + 8) for prompt in prompts]
    expected = await generate_all(Pair(stages.prefill, stages.decode).generate, todo, 1)
    small = config(tiny_llama, "decode-small", 9)
    small = replace(
        small,
        max_model_len=4 * BLOCK_SIZE,
        kv_cache_bytes=7 * BLOCK_SIZE * TOKEN_BYTES // NUM_STAGES,
    )
    async with running(small) as decode:
        run = Pair(stages.prefill, decode, salt="small")
        got = await generate_all(run.generate, todo, len(todo))
        assert decode.engine.stats().extra["num_preempted"] > 0
        assert differences(expected, got) == []
        await idle(stages.prefill, decode)


@pytest.mark.req("S120", "S57")
async def test_each_stage_moves_its_own_layers(stages: Pair) -> None:
    prompt = random.Random(9).choices(VOCABULARY, k=300)
    first = await stages.prefilled(prompt, Sampling(max_tokens=4))
    assert first.ticket is not None
    addresses = first.ticket.addresses
    assert len(set(addresses)) == NUM_STAGES
    assert set(addresses).isdisjoint(stages.decode.info.kv_addresses)
    num_blocks = -(-len(prompt) // BLOCK_SIZE)
    assert stages.decode.info.kv_bytes_per_token == TOKEN_BYTES
    await stages.decoded(prompt, first.token, first.ticket, Sampling(max_tokens=4))
    assert stages.last_received is not None
    assert stages.last_received.kv_bytes == num_blocks * BLOCK_SIZE * TOKEN_BYTES
    await idle(stages.prefill, stages.decode)


@pytest.mark.req("S120", "S76", "S77")
async def test_each_stage_has_its_layers_in_the_host_pool_and_in_files(
    stages: Pair, plain: Plain, tiny_llama: Path, tmp_path: Path
) -> None:
    """The cache holds less than half of the prompts, and the second engine has only the files."""
    todo, expected = plain.decided(stage_cases())
    tiers = replace(POOL, file_store_dir=str(tmp_path), file_store_bytes=64 << 20)
    small = config(tiny_llama, "prefill-1", 3, tiers=tiers, max_model_len=768)
    small = replace(small, kv_cache_bytes=26 * BLOCK_SIZE * TOKEN_BYTES // NUM_STAGES)
    for tier in ("host", "file"):
        async with running(replace(small, incarnation=small.incarnation + 1)) as host:
            assert host.info.num_kv_blocks < 26
            run = Pair(host, stages.decode, salt="tiers")
            for _ in range(2):
                assert differences(expected, await generate_all(run.generate, todo, 2)) == []
            await host.until(lambda: host.tier_counts.get((tier, "served"), 0) > 10)  # noqa: B023
            await idle(host, stages.decode)
    folders = {path.parent.parent.parent for path in tmp_path.rglob("*.kv")}
    assert len(folders) == NUM_STAGES, "by rank"


@pytest.mark.req("S120")
async def test_a_fusion_of_two_stages_draws_what_plain_vllm_draws(
    plain: Plain, tiny_llama: Path
) -> None:
    todo, expected = plain.decided(stage_cases())
    async with running(config(tiny_llama, "fusion-0", 5, **NO_ARENAS)) as host:

        async def alone(prompt: Sequence[int], sampling: Sampling) -> list[int]:
            return await locally(host, prompt, sampling)

        assert differences(expected, await generate_all(alone, todo, NUM_CONCURRENT)) == []
        await host.until_idle()


@pytest.mark.req("S120")
async def test_the_comparison_sees_kv_that_was_zeroed_on_arrival(
    stages: Pair, plain: Plain, tiny_llama: Path
) -> None:
    cases, expected = plain.decided(stage_cases())
    todo = [i for i, case in enumerate(cases) if len(case.prompt) > 30 and case.max_tokens > 3]
    broken = config(tiny_llama, "decode-1", 3, failpoints="decode.pulled=zero-kv")
    async with running(broken) as decode:
        pair = Pair(stages.prefill, decode, salt="zeroed")
        got = await generate_all(pair.generate, [cases[i] for i in todo], 4)
    assert len(differences([expected[i] for i in todo], got)) > len(todo) // 2
    await idle(stages.prefill)


@pytest.mark.req("S120", "S126")
async def test_an_engine_with_two_ranks_of_one_stage_is_refused_in_words(
    stages: Pair, tiny_llama: Path
) -> None:
    """The engine has as many addresses and layers as the others, but its ranks divide the heads."""
    beside = replace(
        config(tiny_llama, "decode-1", 3), tensor_parallel_size=2, pipeline_parallel_size=1
    )
    prompt, sampling = random.Random(9).choices(VOCABULARY, k=70), Sampling(max_tokens=3)
    async with running(beside) as decode:
        assert decode.info.num_ranks == stages.prefill.info.num_ranks
        for pair in (Pair(stages.prefill, decode), Pair(decode, stages.decode)):
            first = await pair.prefilled(prompt, sampling)
            assert first.ticket is not None
            with pytest.raises(LegFailed, match=r"a pipeline of 2 \+ 2 layers") as told:
                await pair.decoded(prompt, first.token, first.ticket, sampling)
            assert told.value.reason == "KV_FORMAT_MISMATCH"
            pair.prefill.engine.release(first.ticket.ticket_id)
            await idle(pair.prefill, pair.decode)


@pytest.mark.req("S120", "S111")
@pytest.mark.parametrize("shaping", SHAPINGS.values(), ids=SHAPINGS)
async def test_penalties_and_seeds_look_at_what_the_last_stage_drew(
    stages: Pair, shaping: LogitShaping
) -> None:
    """A handed-over answer equals one engine's answer. Some parameters count tokens of both
    engines.
    """
    rng = random.Random(21)
    todo = [Case(tuple(rng.choices(VOCABULARY, k=n)), 16, 0.9, 5, shaping) for n in (20, 64, 90)]

    async def alone(prompt: Sequence[int], sampling: Sampling) -> list[int]:
        return await locally(stages.prefill, prompt, sampling)

    expected = await generate_all(alone, todo, 1)
    run = Pair(stages.prefill, stages.decode, salt=f"shaped {shaping}")
    assert differences(expected, await generate_all(run.generate, todo, 3)) == []
    await idle(stages.prefill, stages.decode)


@pytest.mark.req("S120", "S16")
async def test_each_stage_probes_its_own_stage_of_a_peer(stages: Pair) -> None:
    prefill = stages.prefill
    peer = KvPeer("prefill-0", 1, prefill.info.kv_addresses)
    await stages.decode.engine.verify_peer(peer, 20)
    os.kill(prefill.engine.worker_pids[1], signal.SIGSTOP)
    try:
        with pytest.raises(KvTransferFailed, match="rank 1"):
            await stages.decode.engine.verify_peer(peer, 2)
    finally:
        os.kill(prefill.engine.worker_pids[1], signal.SIGCONT)
    await stages.decode.engine.verify_peer(peer, 20)


@pytest.mark.req("S120", "S57")
@pytest.mark.parametrize("stage", range(NUM_STAGES))
async def test_the_loss_of_a_stage_ends_its_engine(
    tiny_llama: Path, stages: Pair, stage: int
) -> None:
    async with running(config(tiny_llama, "decode-9", 9)) as decode:
        pair = Pair(stages.prefill, decode, salt=f"lost {stage}")
        prompt = random.Random(stage).choices(VOCABULARY, k=90)
        first = await pair.prefilled(prompt, sampling := Sampling(max_tokens=400))
        assert first.ticket is not None
        leg = await pair.start_decode(prompt, first.token, first.ticket, sampling)
        await decode.next_output(leg)
        await decode.next_output(leg)  # the decode has drawn a token
        pids = decode.engine.worker_pids
        os.kill(pids[stage], signal.SIGKILL)
        with pytest.raises(EngineFailed):
            await asyncio.wait_for(decode.ended, 30)
        await until(lambda: not any(map(is_alive, pids)), 30)
    await idle(stages.prefill)


@pytest.mark.req("S120")
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"speculation": Speculation(3, 0.6, 0.01)}, "cannot be combined with speculation"),
        ({"pipeline_parallel_size": 5}, "5 is too many stages for a model of 4 layers"),
    ],
)
async def test_what_does_not_go_with_stages_ends_the_start_with_one_line(
    tiny_llama: Path, changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(EngineMisconfigured, match=says) as caught:
        async with running(replace(config(tiny_llama, "refuses", 7), **changes)):
            pytest.fail("it started")
    assert "\n" not in caught.value.message
    assert caught.value.message.startswith("pipeline_parallel_size: ")
