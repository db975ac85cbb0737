"""`pdmesh status`: shows the processes, their registry records, and how busy each instance is.

It reads three sources: the launcher's state file, the registry on NATS, and the answers of the
master and the instances. It marks every source that does not answer. A mesh that was started here
is shown even without its NATS, because operators look when something is broken.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import grpc

from pdmesh.cli.connect import connected
from pdmesh.cli.errors import CommandFailed, no_mesh
from pdmesh.cli.view.counts import counts, ready_counts
from pdmesh.cli.view.output import show
from pdmesh.cli.view.table import table
from pdmesh.config import without_password
from pdmesh.core.groups.unpaired import ReadyInstance, unpaired
from pdmesh.core.model import Role as CoreRole
from pdmesh.errors import MeshError
from pdmesh.launcher import state
from pdmesh.net.grpc import rpc
from pdmesh.net.grpc.admin_client import call_leader
from pdmesh.net.nats.bus import NatsBus
from pdmesh.net.nats.registry import NatsRegistry
from pdmesh.v1.admin_service_pb2 import ListGroupStatesRequest
from pdmesh.v1.common_pb2 import InstancePhase, InstanceRecord, Role
from pdmesh.v1.instance_service_pb2 import GetStatusRequest, GetStatusResponse
from pdmesh.v1.instance_service_pb2_grpc import InstanceServiceStub
from pdmesh.v1.scheduler_service_pb2 import (
    Health,
    InstanceState,
    ListGroupsRequest,
    ListGroupsResponse,
)
from pdmesh.v1.scheduler_service_pb2_grpc import SchedulerServiceStub

_ASK_S: Final = 1.0
_LEASE_S: Final = 3.0
_INSTANCE_SERVICES: Final = ("prefill", "decode", "instance")
_PAIRED: Final = {Role.ROLE_PREFILL: CoreRole.PREFILL, Role.ROLE_DECODE: CoreRole.DECODE}


@dataclass
class Row:
    """One service process.

    `health` is the last verdict of the health-monitor that the master has.
    """

    id: str
    service: str
    role: str = ""
    group: str = ""
    region: str = ""
    phase: str = ""  # how far the instance is between blank and serving
    health: str = ""
    fault_level: int = 0
    fault: str = ""  # the reasons for its level
    is_draining: bool = False
    slots_used: int | None = None
    slots: int | None = None
    num_running: int | None = None
    num_tickets: int | None = None
    num_kv_blocks_free: int | None = None
    model: str = ""
    engine: str = ""
    address: str = ""
    pid: int = 0
    kv_path: str = ""  # where KV waits and lands, host or device, and why


@dataclass
class GroupRow:
    """A group that the desired state names or that has assigned members.

    If the desired state does not name the group, `wanted` is "-".
    """

    id: str
    scenario: str
    state: str
    wanted: str
    ready: str


@dataclass
class Status:
    mesh: dict[str, Any] | None
    problem: str = ""  # why the registry is not shown
    leader_epoch: int | None = None
    rows: list[Row] = field(default_factory=list)
    groups: list[GroupRow] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def run(options: argparse.Namespace) -> int:
    status = asyncio.run(collect(options))
    show(options, asdict(status), lambda: _text(status))
    return 1 if status.problem else 0


async def collect(options: argparse.Namespace) -> Status:
    """Collect the status. Raises CommandFailed without a mesh, or with only a silent NATS."""
    mesh = None if options.nats_url is not None else state.read(options.state_dir)
    if mesh is None and options.nats_url is None:
        raise no_mesh(options.state_dir)
    try:
        return await _collect(options, mesh)
    except (CommandFailed, MeshError) as exc:
        if mesh is None:
            raise
        return Status(_shown(mesh), problem=str(exc))


async def _collect(options: argparse.Namespace, mesh: state.MeshState | None) -> Status:
    async with connected(options) as bus:
        view = await NatsRegistry(bus, _LEASE_S).watch()
        try:
            records = dict(view.records)
        finally:
            await view.close()
        shown = await _ask_for_groups(bus)
    groups, answers = await asyncio.gather(_ask_master(records), _ask_instances(records))
    states = _states(groups)
    rows = [_row(r, states.get(r.instance_id), answers) for _, r in sorted(records.items())]
    epoch = groups.epoch if groups else None
    warnings = unpaired(_ready(records.values()))
    return Status(_shown(mesh) if mesh else None, "", epoch, rows, shown, warnings)


def _ready(records: Iterable[InstanceRecord]) -> dict[str, list[ReadyInstance]]:
    """The prefills and decodes that get requests, by group."""
    found: dict[str, list[ReadyInstance]] = {}
    for record in records:
        role = _PAIRED.get(record.role)
        if role is not None and record.phase == InstancePhase.INSTANCE_PHASE_READY:
            found.setdefault(record.group_id, []).append(
                ReadyInstance(
                    record.instance_id,
                    role,
                    record.model_fingerprint,
                    record.revision,
                    record.kv_region,
                )
            )
    return found


def _shown(mesh: state.MeshState) -> dict[str, Any]:
    """The state without passwords, because people copy it into terminals and tickets."""
    urls = {"nats_url": mesh.nats_url, "redis_url": mesh.redis_url}
    return {**asdict(mesh), **{name: without_password(url) for name, url in urls.items()}}


async def _ask_for_groups(bus: NatsBus) -> list[GroupRow]:
    """The groups, or none if the caller may not see them.

    If the masters have an admin token, the caller's $PDMESH_ADMIN_TOKEN must be the same.
    """
    try:
        states = await call_leader(
            bus,
            os.environ.get("PDMESH_ADMIN_TOKEN", ""),
            lambda stub, metadata, s: stub.ListGroupStates(
                ListGroupStatesRequest(), metadata=metadata, timeout=s
            ),
            within_s=_ASK_S,
        )
    except MeshError:
        return []
    return [
        GroupRow(
            group.group_id,
            group.scenario,
            group.state,
            counts(
                group.num_prefill_wanted,
                group.num_decode_wanted,
                group.num_fusion_wanted,
                group.num_pooling_wanted,
                group.num_encoder_wanted,
            ),
            ready_counts((m.role, m.phase) for m in group.members),
        )
        for group in states.groups
    ]


async def _ask_master(records: Mapping[str, InstanceRecord]) -> ListGroupsResponse | None:
    for record in records.values():
        if record.service != "master-scheduler" or not record.grpc_address:
            continue
        async with rpc.channel_to(record) as channel:
            try:
                return await SchedulerServiceStub(channel).ListGroups(
                    ListGroupsRequest(), timeout=_ASK_S
                )
            except grpc.aio.AioRpcError:
                continue
    return None


async def _ask_instances(records: Mapping[str, InstanceRecord]) -> dict[str, GetStatusResponse]:
    instances = [r for r in records.values() if r.service in _INSTANCE_SERVICES and r.grpc_address]
    answers = await asyncio.gather(*(_ask_instance(r) for r in instances))
    return {r.instance_id: a for r, a in zip(instances, answers, strict=True) if a is not None}


async def _ask_instance(record: InstanceRecord) -> GetStatusResponse | None:
    async with rpc.channel_to(record) as channel:
        try:
            return await InstanceServiceStub(channel).GetStatus(GetStatusRequest(), timeout=_ASK_S)
        except grpc.aio.AioRpcError:
            return None


def _states(groups: ListGroupsResponse | None) -> dict[str, InstanceState]:
    if groups is None:
        return {}
    return {i.record.instance_id: i for group in groups.groups for i in group.instances}


def _row(
    record: InstanceRecord,
    known: InstanceState | None,
    answers: Mapping[str, GetStatusResponse],
) -> Row:
    row = Row(
        id=record.instance_id,
        service=record.service,
        address=record.http_address or record.grpc_address,
        is_draining=record.is_draining,
        pid=record.pid,
        region=record.region,
    )
    if record.service in _INSTANCE_SERVICES:
        row.role = Role.Name(record.role).removeprefix("ROLE_").lower()
        row.group, row.model, row.engine = record.group_id, record.model, record.engine
        row.slots, row.kv_path = record.num_slots, record.kv_path
        row.health = "unknown"
        row.phase = InstancePhase.Name(record.phase).removeprefix("INSTANCE_PHASE_").lower()
        if not record.grpc_address:  # the instance serves nothing yet
            return row
        if known is not None:
            row.health = Health.Name(known.health).removeprefix("HEALTH_").lower()
            row.fault_level, row.fault = known.fault_level, known.fault_reasons
        _add_answer(row, answers.get(record.instance_id))
    return row


def _add_answer(row: Row, answer: GetStatusResponse | None) -> None:
    if answer is None:
        row.health = f"{row.health}, no answer"
        return
    row.slots_used, row.num_running = answer.load.num_slots_used, answer.num_running
    row.num_tickets, row.num_kv_blocks_free = answer.num_tickets, answer.load.num_kv_blocks_free


def _text(status: Status) -> str:
    parts = []
    if (mesh := status.mesh) is not None:
        parts.append(f"mesh: {mesh['phase']}, {mesh['http_url']}/v1, gRPC {mesh['grpc_address']}")
        parts += [f"region {region}: {url}/v1" for region, url in mesh["regions"].items()]
    if status.problem:
        return "\n".join([*parts, f"{status.problem}\n", _processes(status)])
    epoch = "no leader answers" if status.leader_epoch is None else f"epoch {status.leader_epoch}"
    parts.append(f"master: {epoch}\n")
    instances = [row for row in status.rows if row.role]
    parts.append(
        table(
            ("INSTANCE", "ROLE", "GROUP", "PHASE", "HEALTH", "SLOTS", "RUNNING", "KV FREE", "MODEL",
                "ENGINE", "ADDRESS"),
            [
                (
                    row.id, row.role, row.group, row.phase, _health(row),
                    f"{_number(row.slots_used)}/{_number(row.slots)}", _number(row.num_running),
                    _number(row.num_kv_blocks_free), row.model, row.engine, row.address,
                )
                for row in instances
            ],
        )
    )  # fmt: skip
    if status.groups:
        found = [(g.id, g.scenario, g.state, g.wanted, g.ready) for g in status.groups]
        parts.append("\n" + table(("GROUP", "SCENARIO", "STATE", "WANTED", "READY"), found))
    if paths := [(row.id, *row.kv_path.split(": ", 1)) for row in instances if row.kv_path]:
        parts.append("\n" + table(("INSTANCE", "KV MEMORY", "BECAUSE"), paths))
    services = [
        (row.id, row.service, str(row.pid), row.address) for row in status.rows if not row.role
    ]
    parts.append("\n" + table(("SERVICE", "KIND", "PID", "ADDRESS"), services))
    parts += [f"\n{line}" for line in status.warnings]
    if gone := down(status):
        parts.append("\nnot running: " + ", ".join(gone))
    return "\n".join(parts)


def _processes(status: Status) -> str:
    """The processes from the launcher's state file, for when the registry cannot be read."""
    processes = status.mesh["processes"] if status.mesh else {}
    rows = [(n, p["phase"], str(p["pid"]), p["ops_address"]) for n, p in processes.items()]
    return table(("PROCESS", "PHASE", "PID", "OPS"), rows)


def _health(row: Row) -> str:
    draining = ", draining" if row.is_draining else ""
    fault = f", L{row.fault_level} {row.fault}" if row.fault_level else ""
    return row.health + draining + fault


def down(status: Status) -> list[str]:
    processes = status.mesh["processes"] if status.mesh else {}
    return [f"{name} ({p['phase']})" for name, p in processes.items() if p["phase"] != "running"]


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)
