"""Hands KV on layer by layer while prefill computes, with simulated engines over real gRPC. KV
moves through memory or over UCX (S48, S51).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from pdmesh import failpoints
from pdmesh.engine.base import Sampling
from pdmesh.engine.factory import sim_params
from pdmesh.engine.sim import retrieval
from pdmesh.instance.legs.host import HostConfig
from pdmesh.instance.legs.leg_life import PullLimits
from pdmesh.v1 import instance_service_pb2 as pb
from tests.fakes.sim_instances import (
    LegLog,
    SimInstance,
    TestSession,
    generate,
)
from tests.support.sim_reference import sim_reference
from tests.support.sites.sim_pair import MakeTransport, pair, prompt_of
from tests.support.waiting import until

pytestmark = pytest.mark.req("S48", "S51")


class Legs:
    """One request at both instances: its leg at the prefill and its leg at the decode. The test
    acts like a gateway that chooses the decode as soon as the prefill accepts.
    """

    def __init__(self, to_p: TestSession, to_d: TestSession) -> None:
        self.to_p, self.to_d = to_p, to_d

    async def accept(self, prompt: list[int], sampling: Sampling) -> None:
        self.prompt, self.sampling = prompt, sampling
        self.prefill = await self.to_p.prefill(
            prompt, sampling, kv_transfer=pb.KV_TRANSFER_PER_LAYER
        )
        self.accepted = await self.prefill.until("accepted")

    async def start(self) -> LegLog:
        self.decode = await self.to_d.start(
            self.prompt, self.sampling, 0, self.accepted.ticket, awaits_first_token=True
        )
        return self.decode

    async def join(self) -> pb.FirstToken:
        first: pb.FirstToken = await self.prefill.until("first_token", "failed")
        join = pb.Join(key=self.decode.key, first_token_id=first.token_id)
        await self.to_d.send(pb.Command(join=join))
        return first

    async def finish(self) -> list[int]:
        await self.decode.until("finished", "failed", "lost")
        assert self.decode.has("finished"), self.decode.heard[-1]
        assert self.decode.last("kv_received").num_computed_tokens == 0
        return [self.prefill.last("first_token").token_id, *self.decode.tokens]


async def run(to_p: TestSession, to_d: TestSession, prompt: list[int], sampling: Sampling) -> Legs:
    while True:
        legs = Legs(to_p, to_d)
        try:
            await legs.accept(prompt, sampling)
            await legs.start()
            if await legs.decode.until("accepted", "rejected") == pb.Accepted():
                return legs
        except TimeoutError:  # the prefill has rejected the request
            pass
        await to_p.abort(legs.prefill)
        await asyncio.sleep(0.01)


async def check(
    p: SimInstance, to_p: TestSession, to_d: TestSession, prompt: list[int], sampling: Sampling
) -> None:
    expected, _ = sim_reference(prompt, sampling, sim_params(p.settings))
    legs = await run(to_p, to_d, prompt, sampling)
    first = await legs.join()
    if first.finish_reason:
        await to_d.abort(legs.decode)
        assert [first.token_id] == expected
        return
    assert await legs.finish() == expected


async def test_whole_and_per_layer_output_equals_that_of_one_process(
    make_transport: MakeTransport,
) -> None:
    """Prompts have lengths around the boundaries of blocks and chunks. Both transfer modes run at
    once on the same instances.
    """
    lengths = [2, 63, 64, 65, 128, 129, 511, 512, 513, 640, 1024, 1025, 1921]
    async with (
        pair(make_transport, num_slots=32, max_retrievals=32) as (p, _, to_p, to_d),
        asyncio.TaskGroup() as tasks,
    ):
        for n, length in enumerate(lengths):
            sampling = Sampling(max_tokens=2 + 7 * (n % 5), temperature=n % 3 / 2, seed=n)
            tasks.create_task(check(p, to_p, to_d, prompt_of(length, n), sampling))
            if n % 2:
                tasks.create_task(generate(to_p, to_d, prompt_of(length, n), sampling))


async def test_layers_travel_while_later_ones_are_computed() -> None:
    """Eight layers of 2 MiB travel in at least seven ranges. The first range arrives long before
    prefill is done.
    """
    landed: list[bool] = []
    heavy: dict[str, Any] = {"sim_num_layers": 8, "sim_token_bytes": 4096, "sim_law": "demo"}
    prompt, sampling = prompt_of(512), Sampling(max_tokens=4)
    async with pair(**heavy) as (p, d, to_p, to_d):
        legs = Legs(to_p, to_d)
        real = d.engine._memory.blocks.scatter_part

        def scatter_part(*args: Any) -> None:
            landed.append(legs.prefill.has("first_token"))
            real(*args)

        d.engine._memory.blocks.scatter_part = scatter_part  # type: ignore[method-assign,assignment]
        await legs.accept(prompt, sampling)
        await legs.start()
        await legs.join()
        assert await legs.finish() == sim_reference(prompt, sampling, sim_params(p.settings))[0]
    assert len(landed) >= 8
    assert landed.count(False) >= 6, "most ranges were there before token 1"


async def test_a_known_prefix_is_handed_on_too() -> None:
    async with pair() as (p, _, to_p, to_d):
        prompt, sampling = prompt_of(900), Sampling(max_tokens=12)
        await check(p, to_p, to_d, prompt, sampling)
        await check(p, to_p, to_d, prompt[:700] + prompt_of(300, 1), sampling)
        await check(p, to_p, to_d, prompt, sampling)
        cached = [leg.last("first_token").num_cached_tokens for leg in to_p.legs.values()]
        assert cached == [0, 640, 896]


async def test_answers_of_one_token_have_no_ticket() -> None:
    async with pair() as (_, _, to_p, to_d):
        legs = Legs(to_p, to_d)
        await legs.accept(prompt_of(100), Sampling(max_tokens=1))
        assert not legs.accepted.HasField("ticket")
        assert (await legs.prefill.until("first_token")).finish_reason


async def test_most_of_the_kv_is_at_decode_before_prefill_draws_token_1() -> None:
    """The transfer overlaps the computation. So at token 1 only the last layer is missing, and not
    the KV of the whole prompt.
    """
    async with pair(sim_law="demo") as (_, d, to_p, to_d):
        legs = Legs(to_p, to_d)
        await legs.accept(prompt_of(512), Sampling(max_tokens=4))
        await legs.start()
        first = await legs.prefill.until("first_token")
        await legs.decode.until("kv_received")
        assert not legs.decode.tokens, "no token before token 1 is known"
        assert d.host.num_running == 1
        await to_d.send(
            pb.Command(join=pb.Join(key=legs.decode.key, first_token_id=first.token_id))
        )
        assert len(await legs.finish()) == 4


async def test_a_stop_at_token_one_closes_the_ticket_and_the_decode_is_aborted() -> None:
    async with pair() as (p, _, to_p, to_d):
        prompt = prompt_of(300)
        (token,), _ = sim_reference(prompt, Sampling(max_tokens=1), sim_params(p.settings))
        legs = Legs(to_p, to_d)
        await legs.accept(prompt, Sampling(max_tokens=9, stop_token_ids=frozenset({token})))
        await legs.start()
        first = await legs.prefill.until("first_token")
        assert first.finish_reason
        assert not first.HasField("ticket")
        await to_d.abort(legs.decode)


@pytest.mark.fault("F27")
@pytest.mark.parametrize("stage", ["accepted", "started", "kv", "joined", "decoding"])
@pytest.mark.parametrize("how", ["abort", "disconnect"])
async def test_a_request_given_up_at_any_stage_leaves_nothing_behind(stage: str, how: str) -> None:
    """`pair` checks at its end that both instances are idle."""
    async with pair(sim_law="demo") as (_, _, to_p, to_d):
        legs = Legs(to_p, to_d)
        await legs.accept(prompt_of(600), Sampling(max_tokens=200, ignore_eos=True))
        if stage != "accepted":
            await legs.start()
        if stage in {"kv", "joined", "decoding"}:
            await legs.decode.until("kv_received")
        if stage in {"joined", "decoding"}:
            await legs.join()
        if stage == "decoding":
            await legs.decode.until("token")
        if how == "disconnect":
            to_p.call.cancel()
            to_d.call.cancel()
            return
        await to_p.abort(legs.prefill)
        if stage != "accepted":
            await to_d.abort(legs.decode)


@pytest.mark.fault("F2", "F6")
async def test_a_decode_learns_that_its_prefill_gave_up_in_the_middle() -> None:
    async with pair(sim_law="demo") as (_, _, to_p, to_d):
        legs = Legs(to_p, to_d)
        await legs.accept(prompt_of(1900), Sampling(max_tokens=9))
        await legs.start()
        await legs.decode.until("accepted")
        await to_p.abort(legs.prefill)
        failed = await legs.decode.until("failed")
        assert failed.reason == "KV_TRANSFER_FAILED"
        assert failed.is_retryable


async def test_an_abandoned_decode_leaves_the_ticket_to_another() -> None:
    """The first decode's pull ends in the middle. The second decode must get every layer and draw
    the same text.
    """
    prompt, sampling = prompt_of(1900), Sampling(max_tokens=9)
    async with pair(sim_law="demo") as (p, _, to_p, to_d):
        legs = Legs(to_p, to_d)
        await legs.accept(prompt, sampling)
        given_up = await legs.start()
        await given_up.until("accepted")
        await to_d.abort(given_up)
        await legs.start()
        await legs.join()
        assert await legs.finish() == sim_reference(prompt, sampling, sim_params(p.settings))[0]


@pytest.mark.fault("F4")
async def test_kv_that_does_not_come_after_token_1_fails_the_leg() -> None:
    """The decode gets token 1 long before the prefill has computed all layers. The time limit of
    the pull begins with token 1.
    """
    config = HostConfig(PullLimits(0.03))
    async with pair(sim_law="demo", host_config=config) as (_, _, to_p, to_d):
        legs = Legs(to_p, to_d)
        await legs.accept(prompt_of(1900), Sampling(max_tokens=9))
        await legs.start()
        await legs.decode.until("accepted")
        await to_d.send(pb.Command(join=pb.Join(key=legs.decode.key, first_token_id=5)))
        failed = await legs.decode.until("failed")
        assert failed.reason == "KV_TRANSFER_FAILED"
        await to_p.abort(legs.prefill)


async def test_kv_zeroed_on_arrival_changes_the_output() -> None:
    """This is the negative control. It shows that decode computes from the bytes that came layer by
    layer.
    """
    prompt, sampling = prompt_of(200), Sampling(max_tokens=16)
    async with pair() as (p, _, to_p, to_d):
        expected = sim_reference(prompt, sampling, sim_params(p.settings))[0]
        failpoints.arm("decode.pulled=zero-kv@1")
        legs = await run(to_p, to_d, prompt, sampling)
        await legs.join()
        await legs.decode.until("finished")
        tokens = [legs.prefill.last("first_token").token_id, *legs.decode.tokens]
        assert tokens[0] == expected[0]
        assert tokens[1:] != expected[1 : len(tokens)]


@pytest.mark.req("S52", "S53")
async def test_a_request_pulls_its_kv_while_the_batch_is_full_and_begins_when_another_ends() -> (
    None
):
    """The decode has one slot and room for two requests that wait. Two requests wait with their KV,
    and the decode rejects a fourth. Each waiting request must draw its first token exactly one
    iteration after the last token of the request before it.
    """
    async with pair(num_slots=1, max_waiting=2, max_pulls=1, sim_law="demo") as (p, d, to_p, to_d):
        iterations = drawing_iterations(d)
        legs = []
        samplings = [Sampling(max_tokens=n, ignore_eos=True) for n in (40, 12, 12, 12)]
        for seed, sampling in enumerate(samplings):
            prompt = prompt_of(100, seed)
            prefill = await to_p.prefill(prompt, sampling)
            first = await prefill.until("first_token")
            legs.append(await to_d.start(prompt, sampling, first.token_id, first.ticket))
            await legs[-1].until("kv_received", "rejected")
        *served, fourth = legs
        assert fourth.last("rejected").reason == pb.REJECT_REASON_BUSY
        assert d.host.admission.num_slots_used == 3
        await to_p.abort(prefill)
        await served[2].until("finished")
        for seed, leg in enumerate(served):
            expected, _ = sim_reference(
                prompt_of(100, seed), samplings[seed], sim_params(p.settings)
            )
            assert leg.tokens == expected[1:]
    assert len(iterations) == 39 + 11 + 11
    assert iterations == list(range(iterations[0], iterations[0] + len(iterations)))


@pytest.mark.req("S52")
@pytest.mark.parametrize("is_given_up", [False, True])
async def test_a_running_sequence_draws_while_a_long_prompts_kv_is_read(
    is_given_up: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The simulated engine reads large KV in a thread, so that running sequences continue. In this
    test, it reads KV of any size in a thread, and the test holds up the read.

    A request that is given up meanwhile must leave nothing behind, as `pair` checks.
    """
    monkeypatch.setattr(retrieval, "_QUICK_BYTES", 0)
    sampling = Sampling(max_tokens=200, ignore_eos=True)
    may_read = threading.Event()
    async with pair(sim_law="demo") as (p, d, to_p, to_d):
        running = await handed_on(to_p, to_d, prompt_of(100, 1), sampling)
        await running.until("token")
        memory, read = d.engine._memory, d.engine._memory.digest

        def read_later(blocks: Sequence[int], num_tokens: int) -> int:
            assert may_read.wait(30)
            return read(blocks, num_tokens)

        monkeypatch.setattr(memory, "digest", read_later)
        long = await handed_on(to_p, to_d, prompt_of(100, 2), Sampling(max_tokens=5))
        await long.until("kv_received")
        num_drawn = len(running.tokens)
        await until(lambda: len(running.tokens) >= num_drawn + 3)
        assert not long.has("token")
        if is_given_up:
            await to_d.abort(long)
        may_read.set()
        if not is_given_up:
            await long.until("finished")
            expected = sim_reference(
                prompt_of(100, 2), Sampling(max_tokens=5), sim_params(p.settings)
            )
            assert long.tokens == expected[0][1:]
        await to_d.abort(running)


async def handed_on(
    to_p: TestSession, to_d: TestSession, prompt: list[int], sampling: Sampling
) -> LegLog:
    """Let the prefill compute the request, then start it at the decode."""
    prefill = await to_p.prefill(prompt, sampling)
    first = await prefill.until("first_token")
    return await to_d.start(prompt, sampling, first.token_id, first.ticket)


def drawing_iterations(d: SimInstance) -> list[int]:
    """The numbers of those iterations of the engine that draw tokens. The list grows while the
    engine runs.
    """
    engine, num_iterations, drawing = d.engine, 0, list[int]()
    wait_out, draw = engine._wait_out, engine._draw

    async def counted_wait_out(duration: float) -> None:
        nonlocal num_iterations
        num_iterations += 1
        await wait_out(duration)

    def noted_draw() -> None:
        drawing.append(num_iterations)
        draw()

    engine._wait_out, engine._draw = counted_wait_out, noted_draw  # type: ignore[method-assign]
    return drawing
