"""Runs prefill and decode as processes that are registered in a real NATS. Tests how the processes
start, drain, die and end.
"""

from __future__ import annotations

import asyncio
import signal

import numpy as np
import pytest

from pdmesh.engine.base import FinishReason, Sampling
from pdmesh.events.v1.events_pb2 import ErrorReported
from pdmesh.net import subjects
from pdmesh.net.bus import Message
from pdmesh.net.events import decode_event
from pdmesh.net.nats.bus import NatsBus
from pdmesh.v1.common_pb2 import ROLE_DECODE, ROLE_PREFILL
from tests.fakes.sim_instances import TestSession, generate
from tests.support.sim_reference import sim_reference
from tests.support.sites.instance_site import Site, site

__all__ = ["site"]  # pytest finds the fixture under this name

PROMPT: list[int] = np.random.default_rng(3).integers(3, 600, 150).tolist()


async def test_a_pair_of_processes_answers_as_the_model_does_and_shows_itself(site: Site) -> None:
    p, d = await asyncio.gather(
        site.start("prefill", "prefill-0"), site.start("decode", "decode-0")
    )
    assert (p.record.role, d.record.role) == (ROLE_PREFILL, ROLE_DECODE)
    assert p.record.model_fingerprint == d.record.model_fingerprint
    await site.until(lambda: p.is_ready() and d.is_ready())
    async with TestSession(p) as to_p, TestSession(d) as to_d:
        for max_tokens in (1, 2, 30):
            sampling = Sampling(max_tokens=max_tokens, ignore_eos=True)
            expected = sim_reference(PROMPT, sampling)
            assert await generate(to_p, to_d, PROMPT, sampling) == expected
    assert 'pdmesh_admissions_total{pdmesh_outcome="accepted"} 3.0' in p.metrics()
    assert "pdmesh_kv_transfer_duration_seconds_count 2.0" in d.metrics()
    assert "pdmesh_slots_used 0.0" in d.metrics()


@pytest.mark.fault("F41")
async def test_on_sigterm_an_instance_finishes_running_requests_refuses_others_and_deregisters(
    site: Site,
) -> None:
    p, d = await asyncio.gather(
        site.start("prefill", "prefill-0"), site.start("decode", "decode-0")
    )
    sampling = Sampling(max_tokens=60, ignore_eos=True)
    async with TestSession(p) as to_p, TestSession(d) as to_d:
        first = await (await to_p.prefill(PROMPT, sampling)).until("first_token")
        rest = await to_d.start(PROMPT, sampling, first.token_id, first.ticket)
        await rest.until("token")
        d.signal(signal.SIGTERM)
        await site.until(lambda: site.view.records["decode-0"].is_draining)
        async with asyncio.timeout(60):
            while not to_d.loads[-1].is_draining:
                await asyncio.sleep(0.01)
        late = await to_d.start(PROMPT, sampling, first.token_id, first.ticket)
        assert (await late.until("rejected")).reason == 4  # REJECT_REASON_DRAINING
        finished = await rest.until("finished", "failed", "lost")
        assert rest.has("finished"), finished
        assert [first.token_id, *rest.tokens] == sim_reference(PROMPT, sampling)[0]
        assert await d.exit_code() == 0
    await site.until(lambda: "decode-0" not in site.view.records)


@pytest.mark.fault("F6")
async def test_a_killed_decode_is_noticed_and_prefill_frees_its_slot(site: Site) -> None:
    """The decode dies during its pull. The test then asks another decode, as a gateway would."""
    p = await site.start("prefill", "prefill-0", NUM_SLOTS="1", SIM_LAW="zero")
    d = await site.start("decode", "decode-0", FAILPOINT="decode.accepted=sigkill")
    other = await site.start("decode", "decode-1", SIM_LAW="zero")
    sampling = Sampling(max_tokens=20, ignore_eos=True)
    async with TestSession(p) as to_p, TestSession(d) as to_d, TestSession(other) as to_other:
        first = await (await to_p.prefill(PROMPT, sampling)).until("first_token")
        lost = await to_d.start(PROMPT, sampling, first.token_id, first.ticket)
        await lost.until("lost")
        assert await d.exit_code() == -signal.SIGKILL
        rest = await to_other.start(PROMPT, sampling, first.token_id, first.ticket)
        await rest.until("finished")
        assert [first.token_id, *rest.tokens] == sim_reference(PROMPT, sampling)[0]
        expected = sim_reference(PROMPT, sampling)
        assert await generate(to_p, to_other, PROMPT, sampling) == expected


async def test_an_engine_that_dies_ends_the_process_after_telling_its_gateways(site: Site) -> None:
    p = await site.start("prefill", "prefill-0", FAILPOINT="prefill.computing=raise")
    async with TestSession(p) as to_p:
        leg = await to_p.prefill(PROMPT, Sampling(max_tokens=5))
        failed = await leg.until("failed", "lost")
        assert leg.has("failed"), failed
        assert (failed.reason, failed.is_retryable) == ("ENGINE_DIED", True)
        assert await p.exit_code() == 1


async def test_a_failed_leg_and_the_death_of_an_engine_are_published_as_events(site: Site) -> None:
    heard: list[ErrorReported] = []

    async def on_error(message: Message) -> None:
        heard.append(decode_event(message, ErrorReported))

    bus = await NatsBus.connect(site.nats_url, "operator")
    await bus.subscribe(subjects.error_reported(), on_error)
    p = await site.start("prefill", "prefill-0", SIM_LAW="zero")
    d = await site.start("decode", "decode-0", FAILPOINT="decode.token=raise", SIM_LAW="zero")
    sampling = Sampling(max_tokens=5, ignore_eos=True)
    async with TestSession(p) as to_p, TestSession(d) as to_d:
        released = await to_p.prefill(PROMPT, sampling)
        gone = await released.until("first_token")
        await to_p.release(released, gone.ticket.ticket_id)
        rest = await to_d.start(PROMPT, sampling, gone.token_id, gone.ticket)
        await rest.until("failed")
        first = await (await to_p.prefill(PROMPT, sampling)).until("first_token")
        await to_d.start(PROMPT, sampling, first.token_id, first.ticket)
        assert await d.exit_code() == 1
    await site.until(lambda: len(heard) == 2)
    leg, engine = heard
    assert (leg.service, leg.reason) == ("decode", "KV_TRANSFER_FAILED")
    assert leg.request_id == gone.ticket.request_id
    assert gone.ticket.ticket_id.rpartition("-")[2] not in str(heard), (
        "a reader of this event could pull the KV"
    )
    assert (engine.reason, engine.request_id) == ("ENGINE_DIED", "")
    await bus.close()


async def test_a_fusion_process_does_both_phases(site: Site) -> None:
    f = await site.start("prefill", "fusion-0", ROLE="fusion", SIM_LAW="zero")
    sampling = Sampling(max_tokens=200)
    async with TestSession(f) as to_f:
        leg = await to_f.prefill(PROMPT, sampling, is_local=True)
        await leg.until("finished")
        expected, reason = sim_reference(PROMPT, sampling)
        assert [leg.last("first_token").token_id, *leg.tokens] == expected
        assert (reason is FinishReason.STOP) == (leg.last("finished").finish_reason == 1)


@pytest.mark.fault("F4")
async def test_a_prefill_that_freezes_costs_decode_one_bounded_pull(site: Site) -> None:
    p = await site.start("prefill", "prefill-0", SIM_LAW="zero")
    d = await site.start("decode", "decode-0", SIM_LAW="zero", TRANSFER_TIMEOUT_S="1")
    sampling = Sampling(max_tokens=20, ignore_eos=True)
    async with TestSession(p) as to_p, TestSession(d) as to_d:
        first = await (await to_p.prefill(PROMPT, sampling)).until("first_token")
        p.signal(signal.SIGSTOP)
        try:
            rest = await to_d.start(PROMPT, sampling, first.token_id, first.ticket)
            failed = await rest.until("failed")
            assert (failed.reason, failed.is_retryable) == ("KV_TRANSFER_FAILED", True)
        finally:
            p.signal(signal.SIGCONT)
    # On a slow machine, the sessions to the frozen prefill may have timed out. So the test opens
    # new ones.
    async with TestSession(p) as to_p, TestSession(d) as to_d:
        assert await generate(to_p, to_d, PROMPT, sampling) == sim_reference(PROMPT, sampling)
