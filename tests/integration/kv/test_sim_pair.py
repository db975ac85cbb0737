"""Runs a prefill and a decode with simulated engines in one process, over real gRPC. KV moves
through memory or over UCX.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import statistics
import time
from dataclasses import replace
from typing import Any

import grpc
import numpy as np
import pytest

from pdmesh import failpoints
from pdmesh.core.sampling.constraint import Constraint
from pdmesh.core.sampling.logit_shaping import UNSHAPED, LogitShaping
from pdmesh.engine.base import FinishReason, Sampling
from pdmesh.engine.factory import sim_params
from pdmesh.engine.grammars.asked_grammars import AskedGrammar, GrammarKind, grammar_of
from pdmesh.engine.sim.vocabulary import SPECIALS, build_vocabulary
from pdmesh.events.v1.events_pb2 import KvBlocks
from pdmesh.instance.legs.host import HostConfig
from pdmesh.instance.legs.leg_life import PullLimits
from pdmesh.net import subjects
from pdmesh.net.bus import Message
from pdmesh.net.events import decode_event
from pdmesh.v1 import instance_service_pb2 as pb
from tests.fakes.kv.memory_transport import MemoryTransport
from tests.fakes.sim_instances import (
    DECODE,
    FUSION,
    PREFILL,
    LegLog,
    SimInstance,
    TestSession,
    generate,
    sim_instance,
)
from tests.support.sim_reference import sim_reference
from tests.support.sites.sim_pair import MakeTransport, pair, prompt_of
from tests.support.waiting import until


async def check(
    p: SimInstance, to_p: TestSession, to_d: TestSession, prompt: list[int], sampling: Sampling
) -> None:
    expected = sim_reference(prompt, sampling, sim_params(p.settings))
    assert await generate(to_p, to_d, prompt, sampling) == expected


@pytest.mark.req("S1", "S3", "S49")
async def test_the_output_of_a_pair_equals_that_of_one_process(
    make_transport: MakeTransport,
) -> None:
    """Prompts have lengths around the boundaries of blocks, answers are short and long, and all
    requests run at once.
    """
    lengths = [1, 2, 63, 64, 65, 127, 128, 129, 640, 1000, 1919, 1920, 1921]
    lengths += np.random.default_rng(7).integers(1, 1500, 40).tolist()
    async with pair(make_transport) as (p, _, to_p, to_d), asyncio.TaskGroup() as tasks:
        for n, length in enumerate(lengths):
            sampling = Sampling(max_tokens=1 + 7 * (n % 9), temperature=n % 3 / 2, seed=n)
            tasks.create_task(check(p, to_p, to_d, prompt_of(length, n), sampling))


@pytest.mark.req("S37")
async def test_a_seeded_answer_continues_the_same_after_a_death_at_any_token() -> None:
    """As a gateway does after a death, the test puts the emitted tokens into the next attempt's
    prompt.
    """
    async with pair() as (p, _, to_p, to_d):
        for seed in (3, -1):
            prompt = prompt_of(150, seed & 7)
            sampling = Sampling(max_tokens=24, temperature=2.0, seed=seed, ignore_eos=True)
            whole, _ = sim_reference(prompt, sampling, sim_params(p.settings))
            other, _ = sim_reference(prompt, replace(sampling, seed=4), sim_params(p.settings))
            assert whole != other
            for num_drawn in range(1, 24):
                rest = replace(sampling, max_tokens=24 - num_drawn, num_drawn=num_drawn)
                got, _ = await generate(to_p, to_d, [*prompt, *whole[:num_drawn]], rest)
                assert got == whole[num_drawn:], num_drawn


@pytest.mark.req("S37")
async def test_a_constrained_answer_is_the_same_after_a_death_at_any_token() -> None:
    """The constraint applies to the whole answer, whichever engines draw its tokens."""
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {"a": {"type": "string"}, "b": {"enum": [1, "x"]}},
    }
    schema |= {"required": ["a", "b"], "additionalProperties": False}
    vocabulary = build_vocabulary()
    end_of_thought = vocabulary.add(b" over")
    free = Constraint(grammar_of(AskedGrammar(GrammarKind.JSON, json.dumps(schema))))
    thinking = replace(free, begins_after=(end_of_thought,))
    async with pair() as (p, _, to_p, to_d):
        for seed, constraint in ((3, free), (4, free), (5, thinking)):
            prompt = prompt_of(150, seed)
            sampling = Sampling(900, 2.0, seed=seed, constraint=constraint)
            whole, reason = sim_reference(prompt, sampling, sim_params(p.settings))
            assert reason is FinishReason.STOP
            text = b"".join(vocabulary.tokens[t - len(SPECIALS)] for t in whole[:-1])
            if constraint.begins_after:
                text = text.partition(b" over")[2]
            answer = json.loads(text)
            assert set(answer) == {"a", "b"}
            assert answer["b"] in (1, "x")
            assert await generate(to_p, to_d, prompt, sampling) == (whole, reason)
            for num_drawn in range(1, len(whole), 1 + len(whole) // 20):
                rest = replace(sampling, max_tokens=900 - num_drawn, num_drawn=num_drawn)
                got, _ = await generate(to_p, to_d, [*prompt, *whole[:num_drawn]], rest)
                assert got == whole[num_drawn:], num_drawn


@pytest.mark.parametrize("text", ["", "ab"])
async def test_a_complete_form_ends_an_answer_before_its_least_length(text: str) -> None:
    """As with vLLM, no token may follow a complete form, even before `min_tokens`."""
    choice = Constraint(grammar_of(AskedGrammar(GrammarKind.CHOICE, json.dumps([text]))))
    vocabulary = build_vocabulary()
    async with pair() as (_, _, to_p, to_d):
        sampling = Sampling(20, shaping=LogitShaping(min_tokens=10), constraint=choice)
        got, reason = await generate(to_p, to_d, prompt_of(100), sampling)
        assert b"".join(vocabulary.tokens[t - len(SPECIALS)] for t in got[:-1]) == text.encode()
        assert reason is FinishReason.STOP


UNLIKE_ALL = LogitShaping(allowed_token_ids=(0,))  # The padding token. No grammar allows it.


@pytest.mark.parametrize(
    ("grammar", "shaping"), [('start: "a" nothing', UNSHAPED), ('start: "a"', UNLIKE_ALL)]
)
async def test_a_constraint_that_no_engine_can_keep_ends_its_leg_and_frees_everything(
    grammar: str, shaping: LogitShaping
) -> None:
    """Any client can cause this failure at will, so it must not count against the instance."""
    async with pair() as (p, d, to_p, to_d):
        sampling = Sampling(9, shaping=shaping, constraint=Constraint(grammar))
        leg = await to_p.prefill(prompt_of(100), sampling)
        await leg.until("failed")
        failed = leg.last("failed")
        assert (failed.reason, failed.is_retryable) == ("CONSTRAINT_UNSATISFIABLE", False)
        await until(lambda: p.host.num_running == 0)
        assert (p.host.vitals.num_ended, p.host.vitals.num_failed) == (1, 0)
        assert d.host.num_running == 0
        await check(p, to_p, to_d, prompt_of(100), Sampling(max_tokens=5))


@pytest.mark.req("S1")
async def test_answers_of_one_token_never_reach_decode() -> None:
    async with pair() as (p, d, to_p, to_d):
        for length in (1, 64, 200):
            await check(p, to_p, to_d, prompt_of(length), Sampling(max_tokens=1))
        assert not to_d.legs
        assert d.host.num_running == 0


async def test_a_stop_at_token_one_ends_at_prefill() -> None:
    async with pair() as (p, _, to_p, to_d):
        prompt = prompt_of(100)
        token = sim_reference(prompt, Sampling(max_tokens=1), sim_params(p.settings))[0][0]
        sampling = Sampling(max_tokens=9, stop_token_ids=frozenset({token}))
        assert await generate(to_p, to_d, prompt, sampling) == ([token], FinishReason.STOP)
        assert not to_d.legs


async def test_a_known_prefix_is_not_computed_again_and_the_answer_stays_the_same() -> None:
    async with pair() as (p, _, to_p, to_d):
        prompt, sampling = prompt_of(500), Sampling(max_tokens=12)
        await check(p, to_p, to_d, prompt, sampling)
        await check(p, to_p, to_d, prompt[:300] + prompt_of(90, 1), sampling)
        await check(p, to_p, to_d, prompt, sampling)
        cached = [leg.last("first_token").num_cached_tokens for leg in to_p.legs.values()]
        assert cached == [0, 256, 448]


async def test_cached_blocks_survive_only_as_long_as_memory_lasts() -> None:
    async with pair(num_kv_blocks=40) as (p, _, to_p, to_d):
        for seed in range(12):
            await check(p, to_p, to_d, prompt_of(640, seed), Sampling(max_tokens=3))
        await check(p, to_p, to_d, prompt_of(640, 0), Sampling(max_tokens=3))
        last = to_p.legs[max(to_p.legs)]
        assert last.last("first_token").num_cached_tokens == 0


@pytest.mark.req("S47")
async def test_kv_zeroed_on_arrival_changes_the_output() -> None:
    """This is the negative control. It shows that decode computes from the bytes that it
    received.
    """
    prompt, sampling = prompt_of(200), Sampling(max_tokens=16)
    async with pair() as (p, _, to_p, to_d):
        expected = sim_reference(prompt, sampling, sim_params(p.settings))
        failpoints.arm("decode.pulled=zero-kv@1")
        tokens, _ = await generate(to_p, to_d, prompt, sampling)
        assert tokens[0] == expected[0][0]
        assert tokens[1:] != expected[0][1 : len(tokens)]
        await check(p, to_p, to_d, prompt, sampling)


@pytest.mark.req("S13")
async def test_any_prefill_hands_to_any_decode(make_transport: MakeTransport) -> None:
    async with contextlib.AsyncExitStack() as stack:
        instances = [
            await stack.enter_async_context(sim_instance(f"{kind}-{n}", works, make_transport))
            for kind, works, number in (("prefill", PREFILL, 3), ("decode", DECODE, 2))
            for n in range(number)
        ]
        sessions = [await stack.enter_async_context(TestSession(i)) for i in instances]
        for a, to_p in enumerate(sessions[:3]):
            for b, to_d in enumerate(sessions[3:]):
                prompt = prompt_of(130 + 70 * a + 10 * b)
                await check(instances[a], to_p, to_d, prompt, Sampling(max_tokens=20))


@pytest.mark.req("S72")
async def test_fusion_gives_the_output_of_a_pair() -> None:
    async with sim_instance("fusion-0", FUSION, MemoryTransport) as f, TestSession(f) as to_f:
        for length in (1, 63, 64, 65, 500):
            prompt, sampling = prompt_of(length), Sampling(max_tokens=150, ignore_eos=True)
            leg = await to_f.prefill(prompt, sampling, is_local=True)
            await leg.until("finished")
            assert [k for k, _ in leg.heard if k != "token"] == [
                "accepted",
                "first_token",
                "finished",
            ]
            first = leg.last("first_token")
            assert not first.HasField("ticket")
            expected = sim_reference(prompt, sampling, sim_params(f.settings))
            assert ([first.token_id, *leg.tokens], FinishReason.LENGTH) == expected
        await f.until_idle()


@pytest.mark.req("S80")
async def test_the_next_turn_of_a_chat_finds_the_kv_of_the_answer() -> None:
    async with sim_instance("fusion-0", FUSION, MemoryTransport) as f, TestSession(f) as to_f:
        prompt, sampling = prompt_of(100), Sampling(max_tokens=100, ignore_eos=True)
        leg = await to_f.prefill(prompt, sampling, is_local=True)
        await leg.until("finished")
        turn = [*prompt, leg.last("first_token").token_id, *leg.tokens, *prompt_of(30)]
        leg = await to_f.prefill(turn, Sampling(max_tokens=5), is_local=True)
        await leg.until("finished")
        first = leg.last("first_token")
        # The prompt and the answer have 200 tokens, and the last one has no KV.
        assert first.num_cached_tokens == 192
        expected, _ = sim_reference(turn, Sampling(max_tokens=5), sim_params(f.settings))
        assert [first.token_id, *leg.tokens] == expected


@pytest.mark.req("S40")
async def test_a_full_instance_refuses_with_a_reason_and_a_hint_follows() -> None:
    async with pair(num_slots=2) as (_, _, to_p, _):
        legs = [
            await to_p.prefill(prompt_of(70, n), Sampling(max_tokens=5, ignore_eos=True))
            for n in range(4)
        ]
        for leg in legs:
            await leg.until("accepted", "rejected")
        assert [leg.has("accepted") for leg in legs] == [True, True, False, False]
        refused = legs[2].last("rejected")
        assert refused.reason == pb.REJECT_REASON_BUSY
        assert refused.retry_after_ms >= 1
        first = await legs[0].until("first_token")
        await to_p.release(legs[0], first.ticket.ticket_id)
        async with asyncio.timeout(30):
            while to_p.loads[-1].num_slots_used == 2:
                await asyncio.sleep(0.005)
        leg = await to_p.prefill(prompt_of(70), Sampling(max_tokens=5, ignore_eos=True))
        assert await leg.until("accepted", "rejected") == pb.Accepted()


@pytest.mark.req("S40")
async def test_refusals_do_not_wait_while_the_engine_is_in_a_long_step() -> None:
    """Admission must answer without the engine, which computes a long prompt during the whole test.

    The test checks the median time of the rejections, so a busy machine may slow almost half of
    them.
    """
    async with pair(num_slots=1, sim_law="smollm2-cpu") as (_, _, to_p, _):
        long = await to_p.prefill(prompt_of(2000), Sampling(max_tokens=5, ignore_eos=True))
        await long.until("accepted")
        began_at, took_s = time.perf_counter(), list[float]()
        while not long.has("first_token") and len(took_s) < 100:
            began = time.perf_counter()
            leg = await to_p.prefill(prompt_of(70), Sampling(max_tokens=5, ignore_eos=True))
            await leg.until("rejected")
            took_s.append(time.perf_counter() - began)
        is_over = long.has("first_token")
        first = await long.until("first_token")
        step_s = time.perf_counter() - began_at
        print(
            f"{len(took_s)} refusals of {statistics.median(took_s) * 1e3:.2f} ms in {step_s:.2f} s"
        )
        assert len(took_s) == 100 or is_over
        assert statistics.median(took_s) < step_s / 20, (
            "at least twenty refusals came within one step"
        )
        await to_p.release(long, first.ticket.ticket_id)


ANSWER = Sampling(max_tokens=5, ignore_eos=True)


@pytest.mark.req("S40", "S41")
@pytest.mark.parametrize("how", ["pulled", "released", "aborted"])
async def test_if_decode_is_blocked_prefill_fills_its_slots_and_keeps_no_waiting_list(
    how: str,
) -> None:
    """Forty prompts ask for three slots. Each transfer that ends frees one slot, so one more prompt
    is accepted.
    """
    async with pair(num_slots=3) as (p, d, to_p, to_d):

        async def offer(num: int) -> tuple[list[LegLog], list[LegLog]]:
            legs = [await to_p.prefill(prompt_of(90, n), ANSWER) for n in range(num)]
            taken: list[LegLog] = []
            for leg in legs:
                if await leg.until("accepted", "rejected") == pb.Accepted():
                    taken.append(leg)
                assert p.engine.stats().num_running + p.host.num_tickets <= 3
                assert p.host.admission.num_slots_used <= 3
            return taken, [leg for leg in legs if leg not in taken]

        d.host.drain(True)
        taken, refused = await offer(40)
        assert len(taken) == 3
        assert {leg.last("rejected").reason for leg in refused} == {pb.REJECT_REASON_BUSY}
        firsts = [await leg.until("first_token") for leg in taken]
        blocked = await to_d.start(prompt_of(90), ANSWER, firsts[0].token_id, firsts[0].ticket)
        assert (await blocked.until("rejected")).reason == pb.REJECT_REASON_DRAINING
        assert p.engine.stats().num_running == 0, "nothing is left to compute"
        assert (p.host.num_tickets, p.host.admission.num_slots_used) == (3, 3)
        assert not (await offer(5))[0], "KV that waits for a decode holds its slot"

        if how == "pulled":
            d.host.drain(False)
            rest = await to_d.start(prompt_of(90), ANSWER, firsts[0].token_id, firsts[0].ticket)
            await rest.until("finished")
        elif how == "released":
            await to_p.release(taken[0], firsts[0].ticket.ticket_id)
        else:
            await to_p.abort(taken[0])
        await until(lambda: p.host.admission.num_slots_used < 3)
        assert p.host.num_tickets == 2
        again, _ = await offer(5)
        assert len(again) == 1
        await again[0].until("first_token")
        assert all([kind for kind, _ in leg.heard] == ["rejected"] for leg in refused)
        for leg in (*taken[1:], *again):
            await to_p.abort(leg)


@pytest.mark.fault("F27")
@pytest.mark.parametrize("how", ["abort", "disconnect"])
@pytest.mark.parametrize("stage", ["computing", "staged", "pulling", "decoding"])
async def test_a_leg_stopped_at_any_stage_leaves_nothing_behind(how: str, stage: str) -> None:
    law = "demo" if stage in ("computing", "decoding") else "zero"
    async with pair(sim_law=law) as (p, d, to_p, to_d):
        prompt, sampling = prompt_of(400), Sampling(max_tokens=500, ignore_eos=True)
        leg = await to_p.prefill(prompt, sampling)
        session = to_p
        await leg.until("accepted")
        if stage != "computing":
            first = await leg.until("first_token")
        if stage in ("pulling", "decoding"):
            session, leg = to_d, await to_d.start(prompt, sampling, first.token_id, first.ticket)
            await leg.until("accepted" if stage == "pulling" else "token")
        if how == "abort":
            await session.abort(leg)
        else:
            session.call.cancel()
        victim = p if session is to_p else d
        await victim.until_idle()
        if how == "abort" and stage != "decoding":
            assert not leg.has("finished", "failed")


async def test_a_released_ticket_cannot_be_pulled_and_decode_says_so() -> None:
    async with pair() as (p, d, to_p, to_d):
        prompt, sampling = prompt_of(300), Sampling(max_tokens=5, ignore_eos=True)
        leg = await to_p.prefill(prompt, sampling)
        first = await leg.until("first_token")
        await to_p.release(leg, first.ticket.ticket_id)
        await p.until_idle()
        rest = await to_d.start(prompt, sampling, first.token_id, first.ticket)
        failed = await rest.until("failed")
        assert (failed.reason, failed.is_retryable) == ("KV_TRANSFER_FAILED", True)
        await d.until_idle()


@pytest.mark.fault("F5")
async def test_a_ticket_of_an_earlier_incarnation_is_refused() -> None:
    async with pair() as (_, d, to_p, to_d):
        prompt, sampling = prompt_of(300), Sampling(max_tokens=5, ignore_eos=True)
        leg = await to_p.prefill(prompt, sampling)
        first = await leg.until("first_token")
        first.ticket.incarnation += 1
        rest = await to_d.start(prompt, sampling, first.token_id, first.ticket)
        assert (await rest.until("failed")).reason == "KV_TRANSFER_FAILED"
        await d.until_idle()


async def test_staged_kv_that_is_never_pulled_is_freed_when_its_lease_ends() -> None:
    async with pair(ticket_lease_s=0.2) as (p, _, to_p, _):
        leg = await to_p.prefill(prompt_of(300), Sampling(max_tokens=5, ignore_eos=True))
        await leg.until("first_token")
        await p.until_idle()


async def test_a_hello_to_another_incarnation_is_refused() -> None:
    async with sim_instance("prefill-0", PREFILL, MemoryTransport) as p:
        p.settings = replace(p.settings, incarnation=1)
        async with TestSession(p) as to_p:
            await asyncio.wait_for(asyncio.shield(to_p._reader), 30)
            assert to_p.error is not None
            assert to_p.error.code() is grpc.StatusCode.FAILED_PRECONDITION


@pytest.mark.fault("F30")
async def test_a_broken_command_fails_alone_and_a_reused_key_ends_the_session() -> None:
    async with sim_instance("prefill-0", PREFILL, MemoryTransport) as p:
        async with TestSession(p) as to_p:
            bad = await to_p.prefill(
                prompt_of(9), Sampling(max_tokens=5, ignore_eos=True), prompt_token_ids=b"123"
            )
            failed = await bad.until("failed")
            assert (failed.reason, failed.is_retryable) == ("INVALID_REQUEST", False)
            bad = await to_p.prefill(prompt_of(9), Sampling(max_tokens=5, num_drawn=10))
            failed = await bad.until("failed")
            assert (failed.reason, failed.is_retryable) == ("INVALID_REQUEST", False)
            assert "drawn" in failed.message
            leg, command = to_p.prefill_command(
                prompt_of(80), Sampling(max_tokens=5, ignore_eos=True)
            )
            await to_p.send(command, command)
            await leg.until("lost")
            assert to_p.error is not None
            assert to_p.error.code() is grpc.StatusCode.INVALID_ARGUMENT
        await p.until_idle()


async def test_the_death_of_the_engine_fails_every_leg_and_ends_the_host() -> None:
    async with (
        sim_instance("decode-0", DECODE, MemoryTransport) as d,
        sim_instance("prefill-0", PREFILL, MemoryTransport) as p,
        TestSession(p) as to_p,
        TestSession(d) as to_d,
    ):
        failpoints.arm("decode.token=raise@3")
        prompt, sampling = prompt_of(100), Sampling(max_tokens=50, ignore_eos=True)
        first = await (await to_p.prefill(prompt, sampling)).until("first_token")
        rest = await to_d.start(prompt, sampling, first.token_id, first.ticket)
        failed = await rest.until("failed")
        assert (failed.reason, failed.is_retryable) == ("ENGINE_DIED", True)
        assert len(rest.tokens) == 2
        await asyncio.wait([d.pump], timeout=60)
        assert d.pump.exception() is not None


@pytest.mark.fault("F28")
async def test_a_gateway_that_does_not_read_is_cut_off_and_its_legs_end() -> None:
    """The gateway reads nothing, so its receive window fills. After the stall time, the instance
    ends its session.
    """
    config = HostConfig(stall_s=0.3)
    async with sim_instance(
        "fusion-0", FUSION, MemoryTransport, host_config=config, num_slots=64
    ) as f:
        session = TestSession(f)
        async with session:
            await (await session.prefill(prompt_of(9), Sampling(max_tokens=1))).until("accepted")
            session.reads.clear()
            while f.host.num_sessions:
                free = f.host.admission.capacity.num_slots - f.host.admission.num_slots_used
                for _ in range(free):
                    await session.prefill(
                        prompt_of(9), Sampling(max_tokens=2000, ignore_eos=True), is_local=True
                    )
                await asyncio.sleep(0.05)
        await f.until_idle()


async def test_kv_events_report_the_content_of_the_cache_without_gaps() -> None:
    async with pair(num_kv_blocks=40) as (p, _, to_p, to_d):
        known: set[bytes] = set()
        sequences: list[int] = []

        async def on_event(message: Message) -> None:
            event = decode_event(message, KvBlocks)
            sequences.append(event.header.sequence)
            known.difference_update(event.removed)
            known.update(event.stored)

        await p.bus.subscribe(subjects.kv_blocks("prefill-0"), on_event)
        for seed in range(10):
            await check(p, to_p, to_d, prompt_of(700, seed), Sampling(max_tokens=2))
        stub = to_p._channel.unary_stream(
            "/pdmesh.v1.InstanceService/GetKvSnapshot",
            request_serializer=pb.GetKvSnapshotRequest.SerializeToString,
            response_deserializer=pb.GetKvSnapshotResponse.FromString,
        )
        async with asyncio.timeout(30):
            while known != set(p.engine._pool._block_of):
                await asyncio.sleep(0.02)
        assert len(known) > 30
        assert sequences == list(range(1, len(sequences) + 1))
        parts = [part async for part in stub(pb.GetKvSnapshotRequest())]
        assert {h for part in parts for h in part.block_hashes} == known
        assert {part.sequence for part in parts} == {len(sequences)}


@pytest.mark.fault("F23", "F24")
async def test_a_frozen_sender_holds_up_no_pull_from_a_healthy_one() -> None:
    """The decode runs one pull at a time. A pull from the frozen sender has this place, and four
    more of its pulls wait. Only then do pulls from the healthy sender begin.
    """
    made: list[MemoryTransport] = []

    def make() -> MemoryTransport:
        made.append(MemoryTransport())
        return made[-1]

    suspected = HostConfig(PullLimits(600.0, 300.0))
    async with (
        sim_instance("prefill-0", PREFILL, make, ticket_lease_s=600.0) as frozen,
        sim_instance("prefill-1", PREFILL, make) as healthy,
        sim_instance(
            "decode-0", DECODE, make, max_pulls=1, max_retrievals=8, host_config=suspected
        ) as d,
        TestSession(frozen) as to_frozen,
        TestSession(healthy) as to_healthy,
        TestSession(d) as to_d,
    ):
        sampling = Sampling(max_tokens=4)
        # This connects the frozen sender to the decode.
        await check(frozen, to_frozen, to_d, prompt_of(100), sampling)
        handed = []
        for seed in range(1, 6):
            prefill = await to_frozen.prefill(prompt_of(300, seed), sampling)
            handed.append((prefill, prompt_of(300, seed), await prefill.until("first_token")))
        made[0].freeze()
        stuck = [
            await to_d.start(prompt, sampling, first.token_id, first.ticket)
            for _, prompt, first in handed
        ]
        for leg in stuck:
            await leg.until("accepted")
        for seed in range(3):
            await check(healthy, to_healthy, to_d, prompt_of(300, 10 + seed), sampling)
        assert not any(leg.has("finished", "failed", "lost") for leg in stuck)
        assert d.host.excluded_sources() == []
        made[0].is_frozen = False
        made[0].wake()
        for leg in stuck:
            await leg.until("finished")
        for instance in (frozen, healthy, d):
            await instance.until_idle()
