"""`pdmesh status`: shows the processes, their registry records, and how busy each instance is.

The command reads three sources: the launcher's state file, the registry on NATS, and the answers of
the master and the instances. Its output marks every source that does not answer. A mesh that was
started here is shown even if its NATS does not answer, because operators call this command when
something is broken.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from pdmesh.cli.arguments.options import own_token
from pdmesh.cli.connect import connected
from pdmesh.cli.errors import CommandFailed, no_mesh
from pdmesh.cli.view.counts import counts, rank_text, ready_counts
from pdmesh.cli.view.output import show
from pdmesh.cli.view.table import table
from pdmesh.client.admin_calls import AdminCalls, AskLeader
from pdmesh.client.look import INSTANCE_SERVICES, look
from pdmesh.config import without_password
from pdmesh.core.groups.unpaired import ReadyInstance, unpaired
from pdmesh.core.model import Role as CoreRole
from pdmesh.errors import MeshError
from pdmesh.launcher import state
from pdmesh.net.grpc.admin_client import Invoke, T, call_leader
from pdmesh.net.nats.bus import NatsBus
from pdmesh.v1.admin_service_pb2 import ListGroupStatesResponse
from pdmesh.v1.common_pb2 import InstancePhase, InstanceRecord, Role
from pdmesh.v1.instance_service_pb2 import GetStatusResponse
from pdmesh.v1.scheduler_service_pb2 import Health, InstanceState

_ASK_S: Final = 1.0
_PAIRED: Final = {Role.ROLE_PREFILL: CoreRole.PREFILL, Role.ROLE_DECODE: CoreRole.DECODE}


@dataclass
class Row:
    """One service process. `health` is the health-monitor's verdict, as the master knows it."""

    id: str
    service: str
    role: str = ""
    group: str = ""
    domain: str = ""  # a rank of a data-parallel domain, for example `chat-d7 3/8`
    region: str = ""
    phase: str = ""  # the instance's phase, for example blank or ready
    health: str = ""
    fault_level: int = 0
    fault: str = ""  # the reasons for `fault_level`
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
    kv_path: str = ""  # memory that stages and receives KV, and why; " | " between ranks


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
    problem: str = ""  # the reason why the registry could not be read
    leader_epoch: int | None = None
    rows: list[Row] = field(default_factory=list)
    groups: list[GroupRow] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def run(options: argparse.Namespace) -> int:
    status = asyncio.run(collect(options))
    show(options, asdict(status), lambda: _text(status))
    return 1 if status.problem else 0


async def collect(options: argparse.Namespace) -> Status:
    """Collect the status.

    Raises CommandFailed or MeshError if there is nothing to show, because no mesh was started here,
    or the NATS at --nats-url does not answer.
    """
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
        seen = await look(bus, AdminCalls(_ask(bus)))
    rows = [
        _row(record, seen.states.get(record.instance_id), seen.answers)
        for _, record in sorted(seen.records.items())
    ]
    warnings = unpaired(_ready(seen.records.values()))
    shown = _shown(mesh) if mesh else None
    return Status(shown, "", seen.epoch, rows, _group_rows(seen.groups), warnings)


def _ask(bus: NatsBus) -> AskLeader:
    """Call the leader with the token in $PDMESH_TOKEN or $PDMESH_ADMIN_TOKEN.

    Without a token that allows the call, groups are not shown.
    """
    token = own_token("PDMESH_ADMIN_TOKEN")

    async def ask(invoke: Invoke[T], /) -> T:
        return await call_leader(bus, token, invoke, within_s=_ASK_S)

    return ask


def _ready(records: Iterable[InstanceRecord]) -> dict[str, list[ReadyInstance]]:
    """The ready prefills and decodes, by group."""
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
    """The launcher's state without passwords, because users copy the output elsewhere."""
    urls = {"nats_url": mesh.nats_url, "redis_url": mesh.redis_url}
    return {**asdict(mesh), **{name: without_password(url) for name, url in urls.items()}}


def _group_rows(states: ListGroupStatesResponse | None) -> list[GroupRow]:
    if states is None:
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
            ready_counts(group.members),
        )
        for group in states.groups
    ]


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
    if record.service in INSTANCE_SERVICES:
        row.role = Role.Name(record.role).removeprefix("ROLE_").lower()
        row.group, row.model, row.engine = record.group_id, record.model, record.engine
        row.domain = rank_text(record.domain)
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


def _instances(rows: Sequence[Row]) -> str:
    """The table of instances. There is a column DOMAIN only if an instance belongs to a domain."""
    has_domains = any(row.domain for row in rows)
    titles = (
        "INSTANCE",
        "ROLE",
        "GROUP",
        *(("DOMAIN",) if has_domains else ()),
        "PHASE",
        "HEALTH",
        "SLOTS",
        "RUNNING",
        "KV FREE",
        "MODEL",
        "ENGINE",
        "ADDRESS",
    )
    return table(
        titles,
        [
            (
                row.id, row.role, row.group, *((row.domain or "-",) if has_domains else ()),
                row.phase, _health(row),
                f"{_number(row.slots_used)}/{_number(row.slots)}", _number(row.num_running),
                _number(row.num_kv_blocks_free), row.model, row.engine, row.address,
            )
            for row in rows
        ],
    )  # fmt: skip


def _text(status: Status) -> str:
    parts = []
    if (mesh := status.mesh) is not None:
        parts.append(f"mesh: {mesh['phase']}, {mesh['http_url']}/v1, gRPC {mesh['grpc_address']}")
        parts += [f"region {region}: {url}/v1" for region, url in mesh["regions"].items()]
    if status.problem:
        return "\n".join([*parts, f"{status.problem}\n", _processes(status)])
    epoch = "no leader answers" if status.leader_epoch is None else f"epoch {status.leader_epoch}"
    parts.append(f"master: {epoch}\n")
    parts.append(_instances([row for row in status.rows if row.role]))
    if status.groups:
        found = [(g.id, g.scenario, g.state, g.wanted, g.ready) for g in status.groups]
        parts.append("\n" + table(("GROUP", "SCENARIO", "STATE", "WANTED", "READY"), found))
    if paths := _kv_paths(status.rows):
        parts.append("\n" + table(("INSTANCE", "KV MEMORY", "BECAUSE"), paths))
    services = [
        (row.id, row.service, str(row.pid), row.address) for row in status.rows if not row.role
    ]
    parts.append("\n" + table(("SERVICE", "KIND", "PID", "ADDRESS"), services))
    parts += [f"\n{line}" for line in status.warnings]
    if gone := down(status):
        parts.append("\nnot running: " + ", ".join(gone))
    return "\n".join(parts)


def _kv_paths(rows: Sequence[Row]) -> list[tuple[str, str, str]]:
    """A row for each instance, or several rows if its ranks found different paths."""
    found = [(row.id, path) for row in rows if row.kv_path for path in row.kv_path.split(" | ")]
    return [(name, *_split(path)) for name, path in found]


def _split(path: str) -> tuple[str, str]:
    memory, _, reason = path.partition(": ")
    return memory, reason


def _processes(status: Status) -> str:
    """The processes in the launcher's state file. They are shown if the registry cannot be read."""
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
