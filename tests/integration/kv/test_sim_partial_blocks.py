"""Turns of a conversation that go on within a block, on one engine over real gRPC and through a
mesh of processes (S103, S104).

The sim model's tokens depend on every byte of KV, so a correct answer shows that the reused part of
a block was correct.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from pdmesh.core.kv.prefix.partial_block_names import PartialSampling
from pdmesh.engine.base import Sampling
from pdmesh.engine.factory import sim_params
from pdmesh.launcher.mesh import Mesh
from pdmesh.launcher.spec import MeshSpec
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
from tests.support.sites import fleet
from tests.support.sites.sim_pair import prompt_of
from tests.support.waiting import until

WHOLE = PartialSampling(start=208, step=4)  # blocks of 64 tokens have only one name, at their end
SAMPLED = PartialSampling(start=16, step=4)


async def ask(f: SimInstance, to_f: TestSession, prompt: list[int], num_tokens: int) -> list[int]:
    """The answer, which must equal the reference's."""
    sampling = Sampling(max_tokens=num_tokens, ignore_eos=True)
    leg = await to_f.prefill(prompt, sampling, is_local=True)
    await leg.until("finished")
    answer = [leg.last("first_token").token_id, *leg.tokens]
    assert answer == sim_reference(prompt, sampling, sim_params(f.settings))[0]
    return answer


def cached(session: TestSession) -> list[int]:
    """The cached tokens of each computed prompt, in order."""
    firsts = [leg.last("first_token") for leg in session.legs.values()]
    return [first.num_cached_tokens for first in firsts if first is not None]


@pytest.mark.req("S103", "S104")
async def test_a_chat_reuses_all_its_earlier_tokens_and_not_only_full_blocks() -> None:
    async with (
        sim_instance("fusion-0", FUSION, MemoryTransport, partial_sampling=WHOLE) as f,
        TestSession(f) as to_f,
    ):
        chat = prompt_of(37)
        expected = [0]
        for turn in range(8):
            chat += await ask(f, to_f, chat, 21)
            expected.append(len(chat) - 1)  # the last drawn token has no KV
            chat += prompt_of(9, turn)
        await ask(f, to_f, chat, 2)
        assert cached(to_f) == expected
        await f.until_idle()


@pytest.mark.req("S103", "S104")
async def test_chats_that_differ_within_a_block_share_its_named_beginning() -> None:
    async with (
        sim_instance("fusion-0", FUSION, MemoryTransport, partial_sampling=SAMPLED) as f,
        TestSession(f) as to_f,
    ):
        system = prompt_of(64 + 31)
        async with asyncio.TaskGroup() as tasks:  # many at once, each with its own tail
            for seed in range(6):
                tasks.create_task(ask(f, to_f, system + prompt_of(40, seed), 5))
        await ask(f, to_f, system + prompt_of(50, 9), 5)
        assert cached(to_f)[-1] == 64 + 28, (
            "names exist at 16, 20, ..., 28 tokens; the chats differ from token 31 on"
        )
        await f.until_idle()


@pytest.mark.req("S104")
async def test_two_requests_that_continue_one_turn_at_once_do_not_disturb_each_other() -> None:
    async with (
        sim_instance("fusion-0", FUSION, MemoryTransport, partial_sampling=WHOLE) as f,
        TestSession(f) as to_f,
    ):
        start = prompt_of(100)
        start += (await ask(f, to_f, start, 10))[:-1]
        async with asyncio.TaskGroup() as tasks:
            for seed in range(5):
                tasks.create_task(ask(f, to_f, start + prompt_of(20 + seed, seed), 40))
        # The first request takes the block over; others copy it, unless it is full by then.
        reused = cached(to_f)[1:]
        assert max(reused) == len(start)
        assert set(reused) <= {len(start), 64}
        await f.until_idle()


@pytest.mark.req("S104")
@pytest.mark.parametrize("mode", ["whole", "per_layer"])
async def test_prefill_keeps_the_partial_block_of_its_prompts_in_both_modes(mode: str) -> None:
    kv_transfer = {"whole": 1, "per_layer": 2}[mode]
    async with (
        sim_instance("prefill-0", PREFILL, MemoryTransport, partial_sampling=WHOLE) as p,
        sim_instance("decode-0", DECODE, MemoryTransport) as d,
        TestSession(p) as to_p,
        TestSession(d) as to_d,
    ):
        chat, sampling = prompt_of(90), Sampling(max_tokens=12, ignore_eos=True)
        for turn in range(4):
            if mode == "whole":
                answer, _ = await generate(to_p, to_d, chat, sampling)
            else:
                leg = await to_p.prefill(chat, sampling, kv_transfer=kv_transfer)
                accepted = await leg.until("accepted")
                first = await leg.until("first_token")
                rest = await to_d.start(chat, sampling, first.token_id, accepted.ticket)
                await rest.until("finished")
                answer = [first.token_id, *rest.tokens]
            assert answer == sim_reference(chat, sampling, sim_params(p.settings))[0]
            chat = [*chat, *answer, *prompt_of(8, turn)]
        assert cached(to_p) == [0, 90, 110, 130], (
            "the tail of each earlier prompt is reused, but not its answer"
        )
        await p.until_idle()
        await d.until_idle()


@pytest.mark.req("S104")
async def test_an_abandoned_prompt_leaves_the_partial_block_that_it_continued() -> None:
    async with (
        sim_instance(  # at a real engine's pace, so that the prompt is given up while it computes
            "fusion-0", FUSION, MemoryTransport, partial_sampling=WHOLE, sim_law="smollm2-cpu"
        ) as f,
        TestSession(f) as to_f,
    ):
        start = prompt_of(30)
        start += (await ask(f, to_f, start, 6))[:-1]
        leg = await to_f.prefill(
            start + prompt_of(900), Sampling(max_tokens=500, ignore_eos=True), is_local=True
        )
        await leg.until("accepted")
        await to_f.abort(leg)
        await f.until_idle()
        await ask(f, to_f, start + prompt_of(5), 3)
        assert cached(to_f)[-1] == len(start)


@pytest.mark.req("S104")
async def test_wrong_bytes_below_the_watermark_change_the_answer() -> None:
    """The negative control: the reused part of a block is not written anew."""
    async with (
        sim_instance("fusion-0", FUSION, MemoryTransport, partial_sampling=WHOLE) as f,
        TestSession(f) as to_f,
    ):
        start = prompt_of(30)
        start += (await ask(f, to_f, start, 6))[:-1]
        for cache in f.engine._memory.caches:
            cache[:] ^= 1
        with pytest.raises(AssertionError):
            await ask(f, to_f, start + prompt_of(5), 3)


@pytest.mark.req("S103")
async def test_the_master_sends_a_turn_to_the_prefill_that_holds_its_partial_block(
    tmp_path: Path,
) -> None:
    """The chats are shorter than a block, so only names of beginnings show which prefill has them.

    The times of such short prompts are noise.
    """
    spec = fleet.two_by_two(PDMESH_MASTER_SCHEDULER_LATENCY_WEIGHT="0")
    async with Mesh(spec, tmp_path / "mesh") as mesh, httpx.AsyncClient(timeout=30) as client:

        async def turn(messages: list[dict[str, str]]) -> int:
            body = {"model": "default", "messages": messages, "max_tokens": 4, "temperature": 0}
            answer = await client.post(f"{mesh.http_url}/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            whole = answer.json()
            messages.append(whole["choices"][0]["message"])
            return int(whole["usage"]["prompt_tokens_details"]["cached_tokens"])

        def num_indexed() -> float:
            found = fleet.samples(mesh, "master-scheduler")
            return sum(value for name, _, value in found if name == "pdmesh_index_blocks")

        await until(num_indexed)
        num_before = num_indexed()  # from the request with which the gateway proved its path
        for n in range(8):
            messages = [{"role": "user", "content": f"chat number {n * 1237}"}]
            assert await turn(messages) < 40  # at most the template's own beginning
            # A later turn's name replaces the name of the turn that it continues.
            await until(lambda n=n: num_indexed() == num_before + n + 1)
            messages.append({"role": "user", "content": "go on"})
            assert await turn(messages) >= 16, "the first turn's prompt"


async def test_without_a_tail_step_only_full_blocks_are_reused(tmp_path: Path) -> None:
    spec = MeshSpec(
        engine="sim",
        num_prefill=1,
        num_decode=1,
        http_port=0,
        grpc_port=0,
        env={"PDMESH_KV_TAIL_STEP": "0"},
    )
    async with Mesh(spec, tmp_path / "mesh") as mesh, httpx.AsyncClient(timeout=30) as client:
        prompt = prompt_of(100)
        for _ in range(3):
            body = {"model": "default", "prompt": prompt, "max_tokens": 2}
            answer = await client.post(f"{mesh.http_url}/v1/completions", json=body)
            cached_tokens = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached_tokens == 64
