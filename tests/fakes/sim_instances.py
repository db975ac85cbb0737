"""Instances on the simulated engine in this process, behind real gRPC, and a Session client.

A Session is the gRPC stream between a gateway and an instance. A leg is a request's stay on one
instance.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Protocol, Self
from unittest import mock

import grpc

from pdmesh.core.instance.admission import Admission, Capacity, Work
from pdmesh.core.kv.prefix.block_hash import block_hashes, tokens_to_bytes
from pdmesh.engine.base import FinishReason, Sampling
from pdmesh.engine.factory import EngineSettings, build_sim
from pdmesh.engine.sim.engine import SimEngine
from pdmesh.instance.legs.host import HostConfig, HostReports, InstanceHost
from pdmesh.instance.legs.publishing import KvBlocksPublisher
from pdmesh.instance.legs.servicer import InstanceServicer
from pdmesh.kv.tiers.peers import FindHolders
from pdmesh.kv.transport.base import KvTransport
from pdmesh.net.events import EventPublisher
from pdmesh.net.grpc import rpc
from pdmesh.services.gateway.request.leg_commands import constraint_to_proto, shaping_to_proto
from pdmesh.v1 import common_pb2
from pdmesh.v1 import instance_service_pb2 as pb
from tests.fakes.memory_bus import MemoryBus
from tests.support.waiting import PATIENCE_S

PREFILL, DECODE = frozenset({Work.PREFILL}), frozenset({Work.DECODE})
FUSION = frozenset(Work)
ROOT = b"r" * 16
EOS_PERIOD = 300


def settings_of(name: str, works: frozenset[Work], **changes: Any) -> EngineSettings:
    base = EngineSettings(
        engine="sim",
        instance_id=name,
        incarnation=secrets.randbits(62) + 1,
        model="sim",
        model_dir=None,
        num_slots=8,
        block_size=64,
        max_model_len=2048,
        num_kv_blocks=0,
        staging_bytes=0,
        landing_bytes=0,
        max_retrievals=4,
        max_pulls=2,
        ticket_lease_s=10.0,
        sends_kv=Work.PREFILL in works,
        receives_kv=Work.DECODE in works,
        sim_law="zero",
        sim_eos_period=EOS_PERIOD,
    )
    return replace(base, **changes)


@dataclass
class SimInstance:
    settings: EngineSettings
    engine: SimEngine
    host: InstanceHost
    address: str
    bus: MemoryBus
    pump: asyncio.Task[None]

    async def until_idle(self, timeout_s: float = PATIENCE_S) -> None:
        """Wait until all legs are over, and check that nothing is left.

        The host, the admission, the engine and the KV memory must be empty.
        """
        async with asyncio.timeout(timeout_s):
            await self.host.wait_idle()
        self.host.check_invariants()
        admission = self.host.admission
        assert (admission.num_slots_used, admission.num_retrieving) == (0, 0)
        assert admission.num_blocks_free == admission.capacity.num_blocks
        assert admission.staging_bytes_used == admission.landing_bytes_used == 0
        assert self.host.num_tickets == 0
        self.engine.check_idle()


@contextlib.asynccontextmanager
async def sim_instance(
    name: str,
    works: frozenset[Work],
    make_transport: Callable[[], KvTransport],
    *,
    host_config: HostConfig = HostConfig(),  # noqa: B008
    find_holders: FindHolders | None = None,
    max_waiting: int = 0,
    **changes: Any,
) -> AsyncIterator[SimInstance]:
    settings = settings_of(name, works, **changes)
    built = build_sim(settings, make_transport, find_holders)
    engine = built.engine
    assert isinstance(engine, SimEngine)
    info = await engine.start()
    bus = MemoryBus()
    blocks = KvBlocksPublisher(EventPublisher(bus, name, settings.incarnation), name)
    capacity = Capacity(
        works=works,
        num_slots=settings.num_slots,
        num_blocks=info.num_kv_blocks,
        block_size=info.block_size,
        block_bytes=info.kv_bytes_per_token * info.block_size,
        max_model_len=info.max_model_len,
        staging_bytes=built.staging_bytes,
        landing_bytes=built.landing_bytes,
        max_retrievals=settings.max_retrievals,
        max_waiting=max_waiting if Work.PREFILL not in works else 0,
        model_fingerprint=info.model_fingerprint,
        num_adapters=info.max_adapters,
        takes_images=info.images is not None,
    )
    host = InstanceHost(
        engine, Admission(capacity), time.monotonic, host_config, HostReports(blocks.add)
    )
    record = common_pb2.InstanceRecord(instance_id=name, incarnation=settings.incarnation)
    # Both ends of a connection are in the test's process, which answers no ping while it computes.
    with mock.patch.object(rpc, "_KEEPALIVE", ()):
        server = rpc.server()
        rpc.add_service(
            server,
            pb.DESCRIPTOR.services_by_name["InstanceService"],
            InstanceServicer(host, lambda: record, blocks),
        )
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        tasks = [
            asyncio.create_task(host.run()),
            asyncio.create_task(blocks.run()),
            asyncio.create_task(host.tell_progress()),
        ]
        try:
            yield SimInstance(settings, engine, host, f"127.0.0.1:{port}", bus, tasks[0])
        finally:
            await server.stop(0)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            await engine.stop()


@dataclass
class LegLog:
    """The events of one leg, in the order in which a gateway got them.

    They are ("accepted", ...), ("token", id), and so on.
    """

    key: int
    heard: list[tuple[str, Any]] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def last(self, kind: str) -> Any:
        return next((value for k, value in reversed(self.heard) if k == kind), None)

    def has(self, *kinds: str) -> bool:
        return any(kind in kinds for kind, _ in self.heard)

    @property
    def tokens(self) -> list[int]:
        return [value for kind, value in self.heard if kind == "token"]

    async def until(self, *kinds: str, timeout_s: float = PATIENCE_S) -> Any:
        """Wait for an event of one of `kinds`, and return the value of the first one."""
        async with asyncio.timeout(timeout_s):
            while not self.has(*kinds):
                self.changed.clear()
                await self.changed.wait()
        return next(value for kind, value in self.heard if kind in kinds)


class Target(Protocol):
    """An instance to which a session can connect."""

    @property
    def address(self) -> str: ...

    @property
    def settings(self) -> EngineSettings: ...


class TestSession:
    """One gateway's session with one instance."""

    __test__ = False

    def __init__(self, instance: Target, gateway_id: str = "gateway-0") -> None:
        self._instance = instance
        self._channel = rpc.channel(instance.address)
        self._keys = count(1)
        self._gateway_id = gateway_id
        self._writing = asyncio.Lock()
        self.legs: dict[int, LegLog] = {}
        self.loads: list[pb.Load] = []
        self.num_signs = 0  # the number of signs of work, as last reported
        self.num_messages = 0
        self.error: grpc.aio.AioRpcError | None = None
        self.reads = asyncio.Event()  # while this event is cleared, nothing is read
        self.reads.set()

    async def __aenter__(self) -> Self:
        method = self._channel.stream_stream(
            "/pdmesh.v1.InstanceService/Session",
            request_serializer=pb.SessionRequest.SerializeToString,
            response_deserializer=pb.SessionResponse.FromString,
        )
        self.call = method()  # type: ignore[call-arg]  # the stub knows no writing by call
        settings = self._instance.settings
        hello = pb.Hello(
            gateway_id=self._gateway_id,
            instance_id=settings.instance_id,
            incarnation=settings.incarnation,
        )
        await self.send(pb.Command(hello=hello))
        self._reader = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.call.cancel()
        self._reader.cancel()
        await asyncio.wait([self._reader])
        await self._channel.close(None)

    async def send(self, *commands: pb.Command) -> None:
        async with self._writing:  # gRPC allows only one write at a time
            await self.call.write(pb.SessionRequest(commands=commands))

    async def _read(self) -> None:
        try:
            async for response in self.call:
                self._hear(response)
                await self.reads.wait()
        except grpc.aio.AioRpcError as exc:
            self.error = exc
        for leg in self.legs.values():
            self._tell(leg, "lost", None)

    def _hear(self, response: pb.SessionResponse) -> None:
        self.num_messages += 1
        tokens = defaultdict(list)
        for key, token in zip(response.tokens.keys, response.tokens.token_ids, strict=True):
            tokens[key].append(token)
        for key, token_ids in tokens.items():
            for token in token_ids:
                self._tell(self.legs[key], "token", token)
        for event in response.events:
            kind = event.WhichOneof("event")
            assert kind is not None
            self._tell(self.legs[event.key], kind, getattr(event, kind))
        if response.HasField("load"):
            self.loads.append(response.load)
        if response.HasField("progress"):
            self.num_signs = response.progress.num_signs

    @staticmethod
    def _tell(leg: LegLog, kind: str, value: Any) -> None:
        if kind in {"first_token", "kv_received"} and not leg.has("accepted"):
            # accepted is implied if the instance sends one of these events first
            leg.heard.append(("accepted", pb.Accepted()))
        leg.heard.append((kind, value))
        leg.changed.set()

    def _new_leg(self) -> LegLog:
        leg = LegLog(next(self._keys))
        self.legs[leg.key] = leg
        return leg

    def prefill_command(
        self, prompt: Sequence[int], sampling: Sampling, *, is_local: bool = False, **other: Any
    ) -> tuple[LegLog, pb.Command]:
        leg = self._new_leg()
        message = pb.Prefill(
            key=leg.key,
            request_id=f"r{leg.key}",
            attempt=1,
            is_local=is_local,
            **{**self._common(prompt, sampling), **other},
        )
        return leg, pb.Command(prefill=message)

    async def prefill(self, prompt: Sequence[int], sampling: Sampling, **other: Any) -> LegLog:
        leg, command = self.prefill_command(prompt, sampling, **other)
        await self.send(command)
        return leg

    async def start(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        first_token: int,
        ticket: common_pb2.Ticket,
        **other: Any,
    ) -> LegLog:
        """Start a decode. It draws one token less than the client's `sampling` allows."""
        leg = self._new_leg()
        rest = replace(
            sampling, max_tokens=sampling.max_tokens - 1, num_drawn=sampling.num_drawn + 1
        )
        message = pb.Start(
            key=leg.key,
            request_id=ticket.request_id,
            attempt=1,
            first_token_id=first_token,
            ticket=ticket,
            **{**self._common(prompt, rest), **other},
        )
        await self.send(pb.Command(start=message))
        return leg

    async def abort(self, leg: LegLog) -> None:
        await self.send(pb.Command(abort=pb.Abort(key=leg.key)))

    async def release(self, leg: LegLog, ticket_id: str) -> None:
        await self.send(pb.Command(release=pb.Release(key=leg.key, ticket_id=ticket_id)))

    def _common(self, prompt: Sequence[int], sampling: Sampling) -> dict[str, Any]:
        params = common_pb2.SamplingParams(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            seed=sampling.seed,
            stop_token_ids=sampling.stop_token_ids,
            ignore_eos=sampling.ignore_eos,
            num_drawn=sampling.num_drawn,
            constraint=constraint_to_proto(sampling.constraint),
            shaping=shaping_to_proto(sampling.shaping),
        )
        return {
            "prompt_token_ids": tokens_to_bytes(prompt),
            "block_hashes": block_hashes(ROOT, prompt, self._instance.settings.block_size),
            "sampling": params,
            "remaining_ms": 10_000,
            "cache_salt": ROOT.hex(),
        }


_REASONS = {
    common_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    common_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
}


async def generate(
    prefill: TestSession, decode: TestSession, prompt: Sequence[int], sampling: Sampling
) -> tuple[list[int], FinishReason]:
    """Run one request over a pair as a gateway does. A leg that is rejected is sent again.

    Asserts that the request succeeds.
    """
    while True:
        leg = await prefill.prefill(prompt, sampling)
        if await leg.until("accepted", "rejected") == pb.Accepted():
            break
        await asyncio.sleep(leg.last("rejected").retry_after_ms / 1000)
    first = await leg.until("first_token")
    if first.finish_reason:
        assert not first.HasField("ticket")
        return [first.token_id], _REASONS[first.finish_reason]
    while True:
        rest = await decode.start(prompt, sampling, first.token_id, first.ticket)
        if await rest.until("accepted", "rejected") == pb.Accepted():
            break
        await asyncio.sleep(rest.last("rejected").retry_after_ms / 1000)
    await rest.until("finished", "failed", "lost")
    assert rest.has("finished"), rest.heard[-1]
    assert rest.last("kv_received").num_computed_tokens == 0
    return [first.token_id, *rest.tokens], _REASONS[rest.last("finished").finish_reason]
