"""Pooling instances in this process, which make vectors or scores of whole texts.

They have the simulated engine, a real host behind gRPC, and records for the registry.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc

from pdmesh.core.instance.admission import Admission, Capacity, Work
from pdmesh.core.instance.step_time_law import Law
from pdmesh.engine.sim.pooling import SimPoolingConfig, SimPoolingEngine
from pdmesh.engine.step_time_laws import ZERO
from pdmesh.instance.legs.host import InstanceHost
from pdmesh.instance.legs.publishing import KvBlocksPublisher
from pdmesh.instance.legs.servicer import InstanceServicer
from pdmesh.net.convert.pooling_facts import pooling_to_proto
from pdmesh.net.events import EventPublisher
from pdmesh.net.grpc import rpc
from pdmesh.v1 import instance_service_pb2 as pb
from pdmesh.v1.common_pb2 import INSTANCE_PHASE_READY, ROLE_POOLING, InstanceRecord
from tests.fakes.memory_bus import MemoryBus
from tests.support.waiting import PATIENCE_S

SEED = 5


@dataclass
class PoolingSite:
    engine: SimPoolingEngine
    host: InstanceHost
    record: InstanceRecord
    server: grpc.aio.Server

    async def die(self) -> None:
        """Behave as if the process were killed. Every stream breaks at once."""
        await self.server.stop(0)

    async def until_idle(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await self.host.wait_idle()
        self.host.check_invariants()
        assert self.engine.stats().num_running == 0


@contextlib.asynccontextmanager
async def pooling_instance(
    name: str,
    model: str = "vectors",
    *,
    num_dimensions: int = 16,
    num_slots: int = 4,
    max_model_len: int = 512,
    scores_pairs: bool = False,
    law: Law = ZERO,
) -> AsyncIterator[PoolingSite]:
    config = SimPoolingConfig(
        model=model,
        model_fingerprint=f"sim/{model}",
        num_slots=num_slots,
        max_model_len=max_model_len,
        seed=SEED,
        num_dimensions=num_dimensions,
        law=law,
        scores_pairs=scores_pairs,
    )
    engine = SimPoolingEngine(config)
    info = await engine.start()
    incarnation = secrets.randbits(62) + 1
    capacity = Capacity(
        works=frozenset({Work.POOL}),
        num_slots=num_slots,
        num_blocks=0,
        block_size=1,
        block_bytes=0,
        max_model_len=max_model_len,
        staging_bytes=0,
        landing_bytes=0,
        max_retrievals=1,
        model=model,
    )
    host = InstanceHost(engine, Admission(capacity), time.monotonic)
    record = InstanceRecord(
        instance_id=name,
        incarnation=incarnation,
        service="instance",
        role=ROLE_POOLING,
        phase=INSTANCE_PHASE_READY,
        model=model,
        model_fingerprint=info.model_fingerprint,
        max_model_len=max_model_len,
        num_slots=num_slots,
        pooling=pooling_to_proto(engine.facts),
    )
    server = rpc.server()
    blocks = KvBlocksPublisher(EventPublisher(MemoryBus(), name, incarnation), name)
    rpc.add_service(
        server,
        pb.DESCRIPTOR.services_by_name["InstanceService"],
        InstanceServicer(host, lambda: record, blocks),
    )
    record.grpc_address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    tasks = [asyncio.create_task(host.run()), asyncio.create_task(host.tell_progress())]
    try:
        yield PoolingSite(engine, host, record, server)
    finally:
        await server.stop(0)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await engine.stop()
