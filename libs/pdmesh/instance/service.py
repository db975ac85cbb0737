"""The life of an instance process, whatever its role: engine, host, gRPC, presence; then drain and goodbye."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final

import grpc
import structlog

from pdmesh import __version__, failpoints
from pdmesh.core.admission import Admission, Capacity, Work
from pdmesh.engine.base import EngineInfo
from pdmesh.engine.factory import BuiltEngine, EngineSettings, build_engine
from pdmesh.errors import EngineFailed
from pdmesh.instance import instruments
from pdmesh.instance.host import HostConfig, InstanceHost
from pdmesh.instance.publishing import ErrorPublisher, KvBlocksPublisher, LoadPublisher
from pdmesh.instance.servicer import InstanceServicer
from pdmesh.instance.settings import InstanceSettings
from pdmesh.kv.tiers.config import TierConfig
from pdmesh.kv.tiers.holders import HolderDirectory
from pdmesh.lifecycle import App, StartupError
from pdmesh.net import rpc
from pdmesh.net.events import EventPublisher
from pdmesh.net.heartbeat import Presence
from pdmesh.net.held_sources import held_to_proto
from pdmesh.net.nats_bus import NatsBus
from pdmesh.net.nats_registry import NatsRegistry
from pdmesh.v1 import instance_service_pb2
from pdmesh.v1.common_pb2 import ROLE_DECODE, ROLE_FUSION, ROLE_PREFILL, InstanceRecord, Role

log = structlog.get_logger(__name__)

_WORKS: Final = {
    ROLE_PREFILL: frozenset({Work.PREFILL}),
    ROLE_DECODE: frozenset({Work.DECODE}),
    ROLE_FUSION: frozenset({Work.PREFILL, Work.DECODE, Work.LOCAL}),
}
_CLOSE_S: Final = 1.0  # for sessions to read their last message


async def serve(settings: InstanceSettings, app: App, role: Role.ValueType) -> None:
    """Until `app.stopping`, the engine's death, or replacement by another incarnation."""
    failpoints.arm(settings.failpoint)
    engine_settings = _engine_settings(settings, app, role)
    holders = _holders(engine_settings)
    built = build_engine(engine_settings, holders.find if holders is not None else None)
    app.add_readiness("engine", lambda: False)
    started = time.monotonic()
    try:
        if (info := await _start_engine(built, app)) is None:
            return
        log.info("engine.started", engine=info.engine, start_s=round(time.monotonic() - started, 2))
        await _serve_engine(settings, app, role, built, info, holders)
    finally:
        await built.engine.stop()
        if holders is not None:
            await holders.close()


def _holders(settings: EngineSettings) -> HolderDirectory | None:
    tiers = settings.tiers
    return HolderDirectory(settings.instance_id) if tiers.is_on and tiers.uses_peers else None


async def _start_engine(built: BuiltEngine, app: App) -> EngineInfo | None:
    """None if the process was asked to stop first: loading a model takes longer than anybody waits for that."""
    starting = asyncio.create_task(built.engine.start(), name="engine-start")
    await app.until_stopping(starting)
    if starting.done():
        return starting.result()
    starting.cancel()  # once: it takes apart what it has built so far
    await asyncio.wait([starting])
    return None


async def _serve_engine(
    settings: InstanceSettings,
    app: App,
    role: Role.ValueType,
    built: BuiltEngine,
    info: EngineInfo,
    holders: HolderDirectory | None,
) -> None:
    bus = await _unless_stopping(app, NatsBus.connect(settings.nats_url, app.instance_id))
    if bus is None:
        return
    events = EventPublisher(bus, app.instance_id, app.incarnation)
    blocks = KvBlocksPublisher(events, app.instance_id)
    failures = ErrorPublisher(events, app.instance_id, app.service)
    host = InstanceHost(
        built.engine,
        Admission(capacity_of(settings, role, built, info)),
        time.monotonic,
        HostConfig(settings.transfer_timeout_s, settings.stall_s),
        on_blocks=blocks.add,
        on_error=failures.report,
    )
    load = LoadPublisher(events, app.instance_id, host.load, host.book)
    host.on_load = load.changed
    instruments.observe(host)
    record = _record(settings, app, role, info)

    def current_record() -> InstanceRecord:
        record.is_draining = host.admission.is_draining
        del record.held_kv_sources[:]
        record.held_kv_sources.extend(map(held_to_proto, host.held_sources()))
        return record

    registry = NatsRegistry(bus, settings.lease_s)
    presence = Presence(
        registry,
        events,
        lease_s=settings.lease_s,
        is_ready=lambda: not app.not_ready(),
        on_replaced=app.stopping.set,
    )
    host.on_record = presence.refresh
    server = rpc.server()
    servicer = InstanceServicer(host, current_record, blocks, presence.refresh)
    rpc.add_service(
        server, instance_service_pb2.DESCRIPTOR.services_by_name["InstanceService"], servicer
    )
    port = _listen(server, settings)
    record.grpc_address = f"{settings.reachable_host}:{port}"
    await server.start()
    app.add_readiness("engine", lambda: True)
    app.add_readiness("registered", lambda: presence.is_held)
    works = {
        name: asyncio.create_task(work, name=name)
        for name, work in (
            ("outputs", host.run()),
            ("blocks", blocks.run()),
            ("load", load.run()),
            ("failures", failures.run()),
            ("register", _register(presence, current_record)),
        )
    }
    if holders is not None:
        works["holders"] = asyncio.create_task(holders.run(registry), name="holders")
    try:
        await _until_stopped_and_drained(settings, app, host, presence, list(works.values()))
    finally:
        for task in works.values():
            task.cancel()
        await failures.publish_rest()
        await presence.stop()
        host.close_all()
        await server.stop(_CLOSE_S)
        await bus.close()


async def _register(presence: Presence, record: Callable[[], InstanceRecord]) -> None:
    """Beats end well only when the process is asked to stop, or was replaced and will be."""
    await presence.start(record)
    await presence.watch()
    await asyncio.Event().wait()


def _listen(server: grpc.aio.Server, settings: InstanceSettings) -> int:
    try:
        return server.add_insecure_port(f"{settings.host}:{settings.grpc_port}")
    except RuntimeError as exc:
        variable = f"{type(settings).model_config.get('env_prefix', '')}GRPC_PORT"
        raise StartupError(
            f"cannot listen on {settings.host}:{settings.grpc_port}; set {variable}"
        ) from exc


async def _until_stopped_and_drained(
    settings: InstanceSettings,
    app: App,
    host: InstanceHost,
    presence: Presence,
    works: list[asyncio.Task[None]],
) -> None:
    """Raises what a background task raised: the process ends and its supervisor starts it again."""
    if not await _first_of(app.stopping.wait(), works, None):
        return
    host.drain(True)
    presence.refresh()
    log.info("instance.draining", num_slots_used=host.admission.num_slots_used)
    if not await _first_of(host.wait_idle(), works, settings.drain_s):
        log.warning("instance.drain_cut", num_slots_used=host.admission.num_slots_used)


async def _first_of(
    event: Coroutine[Any, Any, object], works: list[asyncio.Task[None]], timeout_s: float | None
) -> bool:
    """Wait for the event while the works go on; False if the time is over. None of the works ever ends well."""
    waiter = asyncio.create_task(event)
    try:
        await asyncio.wait([waiter, *works], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for work in works:
            if work.done():
                work.result()
                raise EngineFailed(f"{work.get_name()} ended by itself")
        return waiter.done()
    finally:
        waiter.cancel()


async def _unless_stopping(app: App, work: Coroutine[Any, Any, NatsBus]) -> NatsBus | None:
    """None if the process was asked to stop first."""
    task, stopping = asyncio.create_task(work), asyncio.create_task(app.stopping.wait())
    try:
        await asyncio.wait([task, stopping], return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        stopping.cancel()


def capacity_of(
    settings: InstanceSettings, role: Role.ValueType, built: BuiltEngine, info: EngineInfo
) -> Capacity:
    """What the loaded engine can hold, for admission."""
    return Capacity(
        works=_WORKS[role],
        num_slots=settings.num_slots,
        num_blocks=info.num_kv_blocks,
        block_size=info.block_size,
        block_bytes=info.kv_bytes_per_token * info.block_size // info.num_ranks,
        max_model_len=info.max_model_len,
        staging_bytes=built.staging_bytes,
        landing_bytes=built.landing_bytes,
        max_retrievals=settings.max_retrievals,
        max_waiting=settings.max_waiting if role == ROLE_DECODE else 0,
        model_fingerprint=info.model_fingerprint,
        num_ranks=info.num_ranks,
        max_reserved_output=settings.max_reserved_output or None,
    )


def _engine_settings(settings: InstanceSettings, app: App, role: Role.ValueType) -> EngineSettings:
    works = _WORKS[role]
    return EngineSettings(
        engine=settings.engine,
        instance_id=app.instance_id,
        incarnation=app.incarnation,
        model=_model_name(settings),
        model_dir=settings.model_dir,
        num_slots=settings.num_slots,
        block_size=settings.block_size,
        max_model_len=settings.max_model_len,
        num_kv_blocks=settings.num_kv_blocks,
        staging_bytes=settings.staging_bytes,
        landing_bytes=settings.landing_bytes,
        max_retrievals=settings.max_retrievals,
        max_pulls=settings.max_pulls,
        ticket_lease_s=settings.ticket_lease_s,
        sends_kv=Work.PREFILL in works,
        receives_kv=Work.DECODE in works,
        kv_host=settings.host,
        kv_advertise_host=settings.advertise_host,
        dtype=settings.dtype,
        kv_cache_dtype=settings.kv_cache_dtype,
        tensor_parallel_size=settings.tensor_parallel_size,
        kv_cache_bytes=settings.kv_cache_bytes,
        tiers=TierConfig(
            host_pool_bytes=settings.kv_host_pool_bytes,
            file_store_dir=str(settings.kv_file_store_dir or ""),
            file_store_bytes=settings.kv_file_store_bytes,
            owner_share=settings.kv_tier_owner_share,
            timeout_s=settings.kv_tier_timeout_s,
            uses_peers=settings.kv_peer_pools,
        ),
        sim_law=settings.sim_law,
        sim_eos_period=settings.sim_eos_period,
        sim_num_layers=settings.sim_num_layers,
        sim_token_bytes=settings.sim_token_bytes,
    )


def _model_name(settings: InstanceSettings) -> str:
    if settings.model or settings.model_dir is None:
        return settings.model or settings.engine
    return settings.model_dir.name


def _record(
    settings: InstanceSettings, app: App, role: Role.ValueType, info: EngineInfo
) -> InstanceRecord:
    return InstanceRecord(
        instance_id=app.instance_id,
        incarnation=app.incarnation,
        service=app.service,
        role=role,
        group_id=settings.group_id,
        scenario=settings.scenario,
        ops_address=app.ops_address,
        kv_addresses=info.kv_addresses,
        model=info.model,
        model_fingerprint=info.model_fingerprint,
        block_size=info.block_size,
        num_kv_blocks=info.num_kv_blocks,
        num_slots=settings.num_slots,
        kv_bytes_per_token=info.kv_bytes_per_token,
        max_model_len=info.max_model_len,
        supports_logprobs=info.supports_logprobs,
        engine=info.engine,
        version=__version__,
        pid=os.getpid(),
    )
