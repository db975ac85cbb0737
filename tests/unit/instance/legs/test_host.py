"""An instance's host handles its engine's outputs while a gateway gives a leg up.

A leg is a request's stay on one instance.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import re
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from typing import Any, cast

import pytest

from pdmesh.core.adapters.fit import AdapterFacts
from pdmesh.core.instance.admission import Admission, Capacity, Work
from pdmesh.core.kv.prefix.block_hash import tokens_to_bytes
from pdmesh.core.kv.prefix.pins import PinnedPrefix
from pdmesh.core.kv.tiers.session_holds import SessionState
from pdmesh.core.kv.transfer.source_exclusions import KvSource
from pdmesh.core.kv.transfer.ticket import PullFailure
from pdmesh.engine.base import (
    DecodeJob,
    Engine,
    EngineInfo,
    EngineStats,
    Failed,
    FinishReason,
    KvPeer,
    Output,
    Prefetch,
    Prefilled,
    PrefillJob,
    SessionHint,
    constraint_failed,
)
from pdmesh.errors import InvalidRequest
from pdmesh.instance.legs import host as legs_host
from pdmesh.instance.legs import instruments
from pdmesh.instance.legs.host import HostReports, InstanceHost
from pdmesh.v1 import common_pb2
from pdmesh.v1 import instance_service_pb2 as pb
from tests.support.logs import capture_logs_of


class EndedEngine:
    """An engine whose job has already ended, so that an abort has no effect. The host has not read
    the end yet.
    """

    def __init__(self, end: Output) -> None:
        self._end = end
        self.prefills: list[PrefillJob] = []
        self.prefetched: list[Prefetch] = []
        self.hints: list[SessionHint] = []

    async def start(self) -> EngineInfo:
        raise NotImplementedError

    async def stop(self) -> None: ...

    def prefill(self, job: PrefillJob) -> None:
        self.prefills.append(job)

    def decode(self, job: DecodeJob) -> None: ...

    def embedded(self, leg: int, encoder: KvPeer | None) -> None: ...

    def abort(self, leg: int) -> None: ...

    def release(self, ticket_id: str) -> None: ...

    async def verify_peer(self, peer: KvPeer, timeout_s: float) -> None: ...

    def forget_peer(self, peer: KvPeer) -> None: ...

    async def inspect_adapter(self, path: str) -> AdapterFacts:
        raise NotImplementedError

    def keep_adapters(self, digests: Collection[str]) -> None: ...

    def prefetch(self, wanted: Prefetch) -> None:
        self.prefetched.append(wanted)

    def note_session(self, hint: SessionHint) -> None:
        self.hints.append(hint)

    def pin(self, prefixes: Sequence[PinnedPrefix]) -> None: ...

    async def outputs(self) -> AsyncIterator[list[Output]]:
        yield [self._end]

    async def ping(self) -> None: ...

    def stats(self) -> EngineStats:
        return EngineStats()


def capacity(num_slots: int = 1) -> Capacity:
    return Capacity(
        works=frozenset({Work.PREFILL}),
        num_slots=num_slots,
        num_blocks=64,
        block_size=4,
        block_bytes=64,
        max_model_len=128,
        staging_bytes=1 << 16,
        landing_bytes=0,
        max_retrievals=1,
    )


def prefill(key: int, max_tokens: int = 1) -> pb.Command:
    return pb.Command(
        prefill=pb.Prefill(
            key=key,
            request_id="r",
            prompt_token_ids=tokens_to_bytes([1, 2, 3]),
            sampling=common_pb2.SamplingParams(max_tokens=max_tokens, top_p=1.0),
            remaining_ms=1000,
        )
    )


@pytest.mark.fault("F27")
@pytest.mark.parametrize(
    "end",
    [
        Prefilled(1, 7, None, 0, FinishReason.LENGTH),
        Prefilled(1, 7, None, 0, FinishReason.STOP),
        Failed(1, "KV_TRANSFER_FAILED", "the staged KV ended"),
    ],
)
async def test_a_client_that_leaves_as_its_prefill_ends_costs_no_slot(end: Output) -> None:
    """The abort comes before the host has read the end of the job. After the end, no further output
    releases the staging range.
    """
    host = InstanceHost(cast(Engine, EndedEngine(end)), Admission(capacity()), time.monotonic)
    outbox = host.open("gateway-0")
    host.apply(outbox, [prefill(5)])
    assert host.admission.num_slots_used == 1
    host.apply(outbox, [pb.Command(abort=pb.Abort(key=5))])
    await host.run()
    async with asyncio.timeout(30):
        await host.wait_idle()
    assert host.admission.num_slots_used == 0
    assert host.admission.staging_bytes_used == 0
    assert host.num_tickets == 0
    host.check_invariants()


def tickets_of(host: InstanceHost, engine: EndedEngine, num: int) -> list[str]:
    host.apply(host.open("gateway-0"), [prefill(key, max_tokens=2) for key in range(1, num + 1)])
    return [job.ticket_id for job in engine.prefills]


def make_host(engine: EndedEngine, **changes: Callable[[], str]) -> InstanceHost:
    admission = Admission(capacity(num_slots=16))
    return InstanceHost(cast(Engine, engine), admission, time.monotonic, **changes)  # type: ignore[arg-type]


@pytest.mark.fault("F39")
def test_the_holder_of_a_ticket_cannot_guess_another() -> None:
    """Whoever has a ticket's id can pull a prompt's KV, so the id has 128 random bits."""
    engine = EndedEngine(Failed(1, "", ""))
    tickets = tickets_of(make_host(engine), engine, 16)
    assert len(tickets) == 16
    secrets = []
    for number, ticket in enumerate(tickets, 1):
        found = re.fullmatch(r"([0-9a-f]+)-([0-9a-f]{32})", ticket)
        assert found, ticket
        assert int(found[1], 16) == number, "the part that may be logged distinguishes tickets"
        secrets.append(found[2])
    for one, other in itertools.combinations(secrets, 2):
        num_same_bytes = sum(
            a == b for a, b in zip(bytes.fromhex(one), bytes.fromhex(other), strict=True)
        )
        assert num_same_bytes < 8, "16 random bytes agree in eight places once in 10**15 pairs"


def test_a_tickets_secret_is_an_argument_so_that_a_run_can_be_repeated() -> None:
    engine, numbers = EndedEngine(Failed(1, "", "")), itertools.count(7)
    host = make_host(engine, new_secret=lambda: f"s{next(numbers)}")
    assert tickets_of(host, engine, 2) == ["1-s7", "2-s8"]


def test_a_command_of_a_later_release_ends_no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """The unknown command is field 99 of `Command`, which no release has yet. The commands sent
    beside it are carried out.
    """
    later = pb.Command.FromString(b"\x9a\x06\x02\x08\x05")
    engine = EndedEngine(Failed(1, "", ""))
    host = make_host(engine)
    outbox = host.open("gateway-0")
    num_ignored = itertools.count()
    monkeypatch.setattr(instruments.unknown_commands, "add", lambda _: next(num_ignored))
    lines = capture_logs_of(legs_host, monkeypatch)
    host.apply(outbox, [prefill(1), later, prefill(2)])
    host.apply(outbox, [later])
    assert len(engine.prefills) == 2
    assert next(num_ignored) == 2
    assert [line["event"] for line in lines] == ["session.unknown_command"]


def hint(**changes: Any) -> pb.Command:
    fields: dict[str, Any] = {
        "session": "s",
        "state": common_pb2.SESSION_STATE_PAUSED_FOR_TOOL,
        "block_hashes": [bytes(16)],
        "tenant": "00" * 16,
        "hold_ms": 1500,
    }
    return pb.Command(session_hint=pb.SessionHint(**fields | changes))


def test_a_session_hint_reaches_the_engine() -> None:
    engine = EndedEngine(Failed(1, "", ""))
    host = make_host(engine)
    host.apply(host.open("gateway-0"), [hint(), hint(block_hashes=[bytes(16)] * 8193)])
    first, long = engine.hints
    paused = SessionState.PAUSED_FOR_TOOL
    assert first == SessionHint("s", paused, (bytes(16),), "00" * 16, 1.5)
    assert len(long.names) == 8192


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"block_hashes": [bytes(15)]}, "session_hint.block_hashes"),
        ({"session": ""}, "session_hint.session"),
        ({"session": "s" * 257}, "session_hint.session"),
        ({"tenant": "t" * 257}, "session_hint.tenant"),
        ({"state": common_pb2.SESSION_STATE_UNSPECIFIED}, "session_hint.state"),
    ],
)
def test_a_bad_session_hint_names_its_field(changes: dict[str, Any], field: str) -> None:
    engine = EndedEngine(Failed(1, "", ""))
    host = make_host(engine)
    with pytest.raises(InvalidRequest) as refused:
        host.apply(host.open("gateway-0"), [hint(**changes)])
    assert refused.value.field == field
    assert engine.hints == []


def prefetch(**changes: Any) -> pb.Command:
    fields: dict[str, Any] = {
        "block_hashes": [bytes(16), bytes(range(16))],
        "cache_salt": "00" * 16,
        "peer": common_pb2.PeerRef(instance_id="decode-0", incarnation=7),
        "kv_addresses": ["there"],
        "chance": 0.5,
    }
    return pb.Command(prefetch=pb.Prefetch(**fields | changes))


def test_a_prefetch_reaches_the_engine() -> None:
    engine = EndedEngine(Failed(1, "", ""))
    host = make_host(engine)
    host.apply(host.open("gateway-0"), [prefetch()])
    host.apply(host.open("gateway-0"), [prefetch(block_hashes=[bytes(16)] * 1025)])
    wanted, long = engine.prefetched
    assert len(long.names) == 1024
    assert wanted.peer == KvPeer("decode-0", 7, ("there",))
    assert (wanted.names, wanted.chance) == ((bytes(16), bytes(range(16))), 0.5)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"block_hashes": [bytes(15)]}, "prefetch.block_hashes"),
        ({"chance": 1.5}, "prefetch.chance"),
        ({"chance": math.nan}, "prefetch.chance"),
    ],
)
def test_a_bad_prefetch_names_its_field(changes: dict[str, Any], field: str) -> None:
    engine = EndedEngine(Failed(1, "", ""))
    host = make_host(engine)
    with pytest.raises(InvalidRequest) as refused:
        host.apply(host.open("gateway-0"), [prefetch(**changes)])
    assert refused.value.field == field
    assert engine.prefetched == []


@pytest.mark.fault("F34")
def test_nothing_is_prefetched_from_a_peer_whose_kv_was_corrupt() -> None:
    engine = EndedEngine(Failed(1, "", ""))
    host = make_host(engine)
    for _ in range(3):
        host._sources.failed(KvSource("decode-0", 7), PullFailure.CORRUPT, "")
    host.apply(host.open("gateway-0"), [prefetch()])
    assert engine.prefetched == []


def test_a_second_hello_is_refused() -> None:
    host = make_host(EndedEngine(Failed(1, "", "")))
    with pytest.raises(InvalidRequest):
        host.apply(host.open("gateway-0"), [pb.Command(hello=pb.Hello(gateway_id="gateway-0"))])


@pytest.mark.req("S83")
def test_the_engine_gets_each_prompt_with_its_tenants_priority() -> None:
    engine = EndedEngine(Failed(1, "", ""))
    commands = [prefill(key) for key in (1, 2, 3)]
    commands[0].prefill.priority, commands[2].prefill.priority = 0, 7
    host = make_host(engine)
    host.apply(host.open("gateway-0"), commands)
    assert [job.priority for job in engine.prefills] == [0, 1, 7]


@pytest.mark.fault("F39")
@pytest.mark.parametrize(
    ("end", "num_failed", "errors"),
    [
        (Failed(1, "ENGINE_FAILED", "it broke"), 1, ["ENGINE_FAILED"]),
        (constraint_failed(1), 0, []),
        (Failed(1, "ADAPTER_UNUSABLE", "no such folder"), 0, ["ADAPTER_UNUSABLE"]),
        (Failed(1, "IMAGE_MISFIT", "other tokens"), 0, ["IMAGE_MISFIT"]),
        (Failed(1, "IMAGE_UNUSABLE", "damaged", is_retryable=False), 0, []),
    ],
)
async def test_failures_that_clients_can_cause_do_not_count_against_the_instance(
    end: Failed, num_failed: int, errors: list[str]
) -> None:
    told: list[str] = []
    reports = HostReports(on_error=lambda reason, message, request_id: told.append(reason))
    engine = cast(Engine, EndedEngine(end))
    host = InstanceHost(engine, Admission(capacity()), time.monotonic, reports=reports)
    host.apply(host.open("gateway-0"), [prefill(5)])
    await host.run()
    assert (host.vitals.num_ended, host.vitals.num_failed) == (1, num_failed)
    assert told == errors
    assert host.admission.num_slots_used == 0
