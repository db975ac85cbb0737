"""Tests LoRA adapters with a simulated prefill and decode. Engines load adapters by digest into a
fixed number of slots, and unload them when they are no longer used.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdmesh.core.adapters.adapter import Adapter
from pdmesh.core.adapters.fit import AdapterFacts
from pdmesh.engine.adapters import adapter_host, files
from pdmesh.engine.adapters.files import read_adapter
from pdmesh.engine.base import Sampling
from pdmesh.v1 import common_pb2
from pdmesh.v1 import instance_service_pb2 as pb
from tests.fakes.kv.memory_transport import MemoryTransport
from tests.fakes.lora_adapters import write_adapter
from tests.fakes.sim_instances import FUSION, SimInstance, TestSession, sim_instance
from tests.support.sim_reference import sim_reference
from tests.support.sites.sim_pair import pair, prompt_of
from tests.support.waiting import until

SAMPLING = Sampling(max_tokens=12, ignore_eos=True)


def adapter_in(folder: Path, name: str, seed: int, **settings: Any) -> Adapter:
    return Adapter(name, write_adapter(folder / name, seed, **settings), str(folder / name))


def of(adapter: Adapter | None) -> dict[str, Any]:
    """The fields of a command for this adapter. Unlike a gateway's commands, these have no block
    names.
    """
    if adapter is None:
        return {"block_hashes": [], "cache_salt": ""}
    a = common_pb2.Adapter(name=adapter.name, digest=adapter.digest, path=adapter.path)
    return {"adapter": a, "block_hashes": [], "cache_salt": ""}


def expected(prompt: list[int], adapter: Adapter | None, instance: SimInstance) -> list[int]:
    digest = adapter.digest if adapter is not None else ""
    params = instance.engine._model.params
    return sim_reference(prompt, SAMPLING, params, digest)[0]


async def answer(
    to_p: TestSession,
    to_d: TestSession,
    prompt: list[int],
    adapter: Adapter | None,
    at_decode: Adapter | None,
) -> list[int]:
    leg = await to_p.prefill(prompt, SAMPLING, **of(adapter))
    first = await leg.until("first_token")
    started = await to_d.start(prompt, SAMPLING, first.token_id, first.ticket, **of(at_decode))
    await started.until("finished")
    return [first.token_id, *started.tokens]


async def test_each_adapter_has_its_own_answers_and_all_run_together(tmp_path: Path) -> None:
    adapters = [adapter_in(tmp_path, "a", 1), adapter_in(tmp_path, "b", 2), None]
    async with pair(max_adapters=2, max_retrievals=8) as (p, d, to_p, to_d):
        cases = [(prompt_of(70 + 9 * i, i), adapters[i % 3]) for i in range(6)]
        got = await asyncio.gather(*(answer(to_p, to_d, prompt, a, a) for prompt, a in cases))
        assert got == [expected(prompt, a, p) for prompt, a in cases]
        assert len(p.host.loaded_adapters) == len(d.host.loaded_adapters) == 2


async def test_answers_are_the_same_per_layer_and_on_one_instance(tmp_path: Path) -> None:
    a, prompt = adapter_in(tmp_path, "a", 1), prompt_of(130)
    async with pair(max_adapters=1) as (p, _, to_p, to_d):
        leg = await to_p.prefill(prompt, SAMPLING, kv_transfer=pb.KV_TRANSFER_PER_LAYER, **of(a))
        accepted = await leg.until("accepted")
        early = pb.Command(
            start=pb.Start(
                key=77,
                request_id="r",
                ticket=accepted.ticket,
                awaits_first_token=True,
                **{**to_d._common(prompt, Sampling(11, ignore_eos=True, num_drawn=1)), **of(a)},
            )
        )
        to_d.legs[77] = type(leg)(77)
        await to_d.send(early)
        first = await leg.until("first_token")
        await to_d.send(pb.Command(join=pb.Join(key=77, first_token_id=first.token_id)))
        await to_d.legs[77].until("finished")
        assert [first.token_id, *to_d.legs[77].tokens] == expected(prompt, a, p)
    async with sim_instance("fusion-0", FUSION, MemoryTransport, max_adapters=1) as fusion:
        async with TestSession(fusion) as session:
            leg = await session.prefill(prompt, SAMPLING, is_local=True, **of(a))
            await leg.until("finished")
            first = leg.last("first_token")
            assert [first.token_id, *leg.tokens] == expected(prompt, a, fusion)
        await fusion.until_idle()


async def test_a_decode_without_the_adapter_would_answer_something_else(tmp_path: Path) -> None:
    """This is the negative control. If a decode forgets the adapter, the output differs."""
    a, prompt = adapter_in(tmp_path, "a", 1), prompt_of(70)
    async with pair(max_adapters=1) as (p, _, to_p, to_d):
        got = await answer(to_p, to_d, prompt, a, None)
        right = expected(prompt, a, p)
        assert got[0] == right[0]
        assert got != right
        assert right != expected(prompt, None, p)


async def test_requests_for_more_adapters_than_slots_wait_and_take_turns(tmp_path: Path) -> None:
    a, b = adapter_in(tmp_path, "a", 1), adapter_in(tmp_path, "b", 2)
    slow = Sampling(max_tokens=2000, ignore_eos=True)
    async with sim_instance("fusion-0", FUSION, MemoryTransport, max_adapters=1) as fusion:
        async with TestSession(fusion) as session:
            running = await session.prefill(prompt_of(70), slow, is_local=True, **of(a))
            await running.until("first_token")
            refused = await session.prefill(prompt_of(71), SAMPLING, is_local=True, **of(b))
            rejected = await refused.until("rejected")
            assert rejected.reason == pb.REJECT_REASON_BUSY
            assert rejected.detail == "all adapter slots are in use"
            plain = await session.prefill(prompt_of(71), SAMPLING, is_local=True, **of(None))
            await plain.until("finished")
            await session.abort(running)
            again = await session.prefill(prompt_of(71), SAMPLING, is_local=True, **of(b))
            await again.until("finished")
            first = again.last("first_token")
            assert [first.token_id, *again.tokens] == expected(prompt_of(71), b, fusion)
            assert fusion.host.loaded_adapters == (b.digest,)
        await fusion.until_idle()


@pytest.mark.req("S33")
async def test_an_adapter_from_a_slow_store_gives_a_sign_of_work_with_each_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gateway gives up a request at an instance that shows no sign of work. So a store that
    delivers must cause signs of work, and a store that hangs must cause none.
    """
    a = adapter_in(tmp_path, "a", 1)
    may_read = threading.Semaphore(0)

    def read_slowly(folder: Path, copy: Path, on_piece: Callable[[], None]) -> AdapterFacts:
        def read() -> None:
            assert may_read.acquire(timeout=60)
            on_piece()

        return read_adapter(folder, copy, read)

    monkeypatch.setattr(adapter_host, "read_adapter", read_slowly)
    monkeypatch.setattr(files, "_PIECE", 200)
    async with sim_instance("fusion-0", FUSION, MemoryTransport, max_adapters=1) as fusion:
        async with TestSession(fusion) as session:
            leg = await session.prefill(prompt_of(70), SAMPLING, is_local=True, **of(a))
            await leg.until("accepted")
            for num_pieces in range(1, 3):
                before = session.num_signs
                may_read.release()
                await until(lambda before=before: session.num_signs > before)
                assert fusion.engine.stats().num_signs == num_pieces
                assert not leg.has("first_token")
            may_read.release(100)
            await leg.until("finished")
        await fusion.until_idle()


async def test_an_adapter_that_cannot_be_loaded_ends_only_its_own_requests(
    tmp_path: Path,
) -> None:
    good = adapter_in(tmp_path, "good", 1)
    changed = Adapter("changed", "0" * 64, good.path)
    missing = Adapter("missing", "1" * 64, str(tmp_path / "nowhere"))
    large = adapter_in(tmp_path, "large", 2, rank=32)
    pissa = adapter_in(tmp_path, "pissa", 3, init_lora_weights="pissa")
    async with pair(max_adapters=2) as (p, _, to_p, to_d):
        for bad in (changed, missing, large, pissa):
            for extra in ({}, {"kv_transfer": pb.KV_TRANSFER_PER_LAYER}):
                leg = await to_p.prefill(prompt_of(70), SAMPLING, **of(bad), **extra)
                failed = await leg.until("failed")
                may_fit_elsewhere = bad is not pissa
                assert failed.reason == "ADAPTER_UNUSABLE"
                assert failed.is_retryable == may_fit_elsewhere
                assert bad.name in failed.message
        leg = await to_p.prefill(prompt_of(70), SAMPLING, **of(good))
        first = await leg.until("first_token")
        decode = await to_d.start(
            prompt_of(70), SAMPLING, first.token_id, first.ticket, **of(changed)
        )
        assert (await decode.until("failed")).reason == "ADAPTER_UNUSABLE"
        await to_p.release(leg, first.ticket.ticket_id)
        assert await answer(to_p, to_d, prompt_of(90), good, good) == expected(
            prompt_of(90), good, p
        )


async def test_a_leg_that_ends_while_its_adapter_loads_leaves_nothing(tmp_path: Path) -> None:
    """The requests are prefills in both transfer modes, and one decode. `pair` checks at its end
    that nothing is left.
    """
    adapters = [adapter_in(tmp_path, name, seed) for seed, name in enumerate("abcdef")]
    async with pair(max_adapters=8) as (_, _, to_p, to_d):
        ways = [{}, {"kv_transfer": pb.KV_TRANSFER_PER_LAYER}]
        for number, adapter in enumerate(adapters):
            extra: Any = ways[number % 2]
            leg, command = to_p.prefill_command(prompt_of(70), SAMPLING, **of(adapter), **extra)
            await to_p.send(command, pb.Command(abort=pb.Abort(key=leg.key)))
        plain = await to_p.prefill(prompt_of(70), SAMPLING)
        first = await plain.until("first_token")
        key = 99
        start = pb.Start(
            key=key,
            request_id=first.ticket.request_id,
            first_token_id=first.token_id,
            ticket=first.ticket,
            **{**to_d._common(prompt_of(70), SAMPLING), **of(adapters[0])},
        )
        to_d.legs[key] = type(plain)(key)
        await to_d.send(pb.Command(start=start), pb.Command(abort=pb.Abort(key=key)))
        await to_p.release(plain, first.ticket.ticket_id)


async def test_a_removed_adapter_is_unloaded_after_its_last_request(tmp_path: Path) -> None:
    a, prompt = adapter_in(tmp_path, "a", 1), prompt_of(70)
    slow = Sampling(max_tokens=2000, ignore_eos=True)
    async with sim_instance("fusion-0", FUSION, MemoryTransport, max_adapters=1) as fusion:
        async with TestSession(fusion) as session:
            running = await session.prefill(prompt, slow, is_local=True, **of(a))
            await running.until("first_token")
            fusion.engine.keep_adapters([])
            await until(lambda: len(running.tokens) > 20)
            assert fusion.host.loaded_adapters == (a.digest,)
            await session.abort(running)
            await until(lambda: fusion.host.loaded_adapters == ())
        await fusion.until_idle()


async def test_an_instance_without_adapter_slots_takes_no_adapters(tmp_path: Path) -> None:
    a = adapter_in(tmp_path, "a", 1)
    async with pair() as (p, _, to_p, _):
        leg = await to_p.prefill(prompt_of(70), SAMPLING, **of(a))
        assert (await leg.until("rejected")).reason == pb.REJECT_REASON_WRONG_MODEL
        with pytest.raises(Exception, match="takes no adapters"):
            await p.engine.inspect_adapter(a.path)


async def test_an_adapter_without_a_name_or_digest_is_refused(tmp_path: Path) -> None:
    a = adapter_in(tmp_path, "a", 1)
    async with pair(max_adapters=1) as (_, _, to_p, _):
        for bad in (Adapter("a/b", a.digest, a.path), Adapter("a", "x", a.path)):
            leg = await to_p.prefill(prompt_of(70), SAMPLING, **of(bad))
            failed = await leg.until("failed")
            assert (failed.reason, failed.is_retryable) == ("INVALID_REQUEST", False)
