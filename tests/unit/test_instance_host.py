"""What an instance's host makes of its engine's outputs when a gateway gives a leg up at the same time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import cast

import pytest

from pdmesh.core.admission import Admission, Capacity, Work
from pdmesh.core.block_hash import tokens_to_bytes
from pdmesh.core.pins import PinnedPrefix
from pdmesh.engine.base import (
    DecodeJob,
    Engine,
    EngineInfo,
    EngineStats,
    Failed,
    FinishReason,
    KvPeer,
    Output,
    Prefilled,
    PrefillJob,
)
from pdmesh.instance.host import InstanceHost
from pdmesh.v1 import common_pb2
from pdmesh.v1 import instance_service_pb2 as pb


class EndedEngine:
    """Its job has ended by itself, and the host has not read that yet: there is nothing left to abort."""

    def __init__(self, end: Output) -> None:
        self._end = end

    async def start(self) -> EngineInfo:
        raise NotImplementedError

    async def stop(self) -> None: ...

    def prefill(self, job: PrefillJob) -> None: ...

    def decode(self, job: DecodeJob) -> None: ...

    def abort(self, leg: int) -> None: ...

    def release(self, ticket_id: str) -> None: ...

    async def verify_peer(self, peer: KvPeer, timeout_s: float) -> None: ...

    def forget_peer(self, peer: KvPeer) -> None: ...
    def pin(self, prefixes: Sequence[PinnedPrefix]) -> None: ...

    async def outputs(self) -> AsyncIterator[list[Output]]:
        yield [self._end]

    async def ping(self) -> None: ...

    def stats(self) -> EngineStats:
        return EngineStats()


def capacity() -> Capacity:
    return Capacity(
        works=frozenset({Work.PREFILL}),
        num_slots=1,
        num_blocks=64,
        block_size=4,
        block_bytes=64,
        max_model_len=128,
        staging_bytes=1 << 16,
        landing_bytes=0,
        max_retrievals=1,
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
    """The end waits to be read when the abort comes; neither says a word about the staging range after that."""
    host = InstanceHost(cast(Engine, EndedEngine(end)), Admission(capacity()), time.monotonic)
    outbox = host.open("gateway-0")
    prefill = pb.Prefill(
        key=5,
        request_id="r",
        prompt_token_ids=tokens_to_bytes([1, 2, 3]),
        sampling=common_pb2.SamplingParams(max_tokens=1, top_p=1.0),
        remaining_ms=1000,
    )
    host.apply(outbox, [pb.Command(prefill=prefill)])
    assert host.admission.num_slots_used == 1
    host.apply(outbox, [pb.Command(abort=pb.Abort(key=5))])
    await host.run()
    async with asyncio.timeout(30):
        await host.wait_idle()
    assert host.admission.num_slots_used == 0
    assert host.admission.staging_bytes_used == 0
    assert host.num_tickets == 0
    host.check_invariants()
