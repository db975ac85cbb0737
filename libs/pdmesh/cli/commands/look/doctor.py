"""`pdmesh doctor`: finds problems of this machine, the settings, a desired state and a mesh."""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Final

from pdmesh.cli.commands.look import status
from pdmesh.cli.connect import connected
from pdmesh.cli.doctor.certificates import examine_ports, own_certificate, ports_of
from pdmesh.cli.doctor.diagnosis import Diagnosis, Grade, ok, problem
from pdmesh.cli.doctor.machine import examine_machine
from pdmesh.cli.doctor.mesh import of_clocks, of_health, of_leader, of_services, of_versions
from pdmesh.cli.doctor.settings import examine_settings
from pdmesh.cli.errors import CommandFailed
from pdmesh.cli.texts import text_of
from pdmesh.cli.view.output import show
from pdmesh.cli.view.progress import ProgressLine
from pdmesh.desired_file import read
from pdmesh.errors import InvalidRequest, MeshError
from pdmesh.events.v1.events_pb2 import InstanceHealth
from pdmesh.launcher import state
from pdmesh.net import subjects
from pdmesh.net.bus import Message
from pdmesh.net.events import decode_event
from pdmesh.net.nats.bus import NatsBus
from pdmesh.net.nats.registry import WATCHER_LEASE_S, NatsRegistry

if TYPE_CHECKING:
    from pdmesh.net.tls.certificate_renewal import CertificateFolder

_PORTS: Final = (("PDMESH_HTTP_PORT", "8000"), ("PDMESH_GRPC_PORT", "8001"))
_NO_MESH: Final = "not checked, because no mesh runs here; start one with: pdmesh up"


def run(options: argparse.Namespace) -> int:
    """Return 1 if there is a problem, but 0 if there are only warnings."""
    diagnoses = asyncio.run(_examine(options))
    show(options, [asdict(each) for each in diagnoses], lambda: diagnoses_text(diagnoses))
    return int(any(each.grade is Grade.PROBLEM for each in diagnoses))


async def _examine(options: argparse.Namespace) -> list[Diagnosis]:
    line, found = ProgressLine(), list[Diagnosis]()
    mesh = state.read(options.state_dir)
    has_mesh = mesh is not None or options.nats_url is not None
    engine = mesh.engine if mesh is not None else options.engine
    line.say("examining this machine")
    ports = [] if mesh is not None else _ports()
    found += await asyncio.to_thread(
        lambda: list(examine_machine(engine, options.state_dir, ports))
    )
    line.say("asking each service how it reads the settings")
    found += await examine_settings(os.environ)
    if options.groups is not None:
        found.append(_of_groups(options))
    if has_mesh:
        line.say("examining the mesh")
        tls_dir = os.environ.get("PDMESH_TLS_DIR", "") or (mesh.tls_dir if mesh else "")
        own, about = await asyncio.to_thread(own_certificate, tls_dir)
        found += about
        found += [each async for each in _mesh(options, own)]
    else:
        found.append(ok("mesh", _NO_MESH))
    line.end()
    return found


def _ports() -> list[int]:
    """The ports on which a mesh would listen. Another check reports invalid ports."""
    asked = [os.environ.get(name, default) for name, default in _PORTS]
    return [int(port) for port in asked if port.isdecimal() and 0 < int(port) < 1 << 16]


def _of_groups(options: argparse.Namespace) -> Diagnosis:
    try:
        groups = read(text_of(options.groups)).groups
    except InvalidRequest as exc:
        return problem("groups", f"{options.groups}: {exc.message}", "correct the file")
    return ok("groups", f"{options.groups} names {len(groups)} groups")


async def _mesh(
    options: argparse.Namespace, own: CertificateFolder | None
) -> AsyncIterator[Diagnosis]:
    mesh = state.read(options.state_dir)
    nats_url = options.nats_url or (mesh.nats_url if mesh is not None else "")
    try:
        seen = await status.collect(options)
        if seen.problem:
            raise CommandFailed(seen.problem)
        async with connected(options) as bus:
            yield ok("NATS", "answers")
            view = await NatsRegistry(bus, WATCHER_LEASE_S).watch()
            records = dict(view.records)
            await view.close()
            ahead_s = await _ahead_s(bus)
    except (CommandFailed, MeshError) as exc:
        yield problem(
            "mesh", getattr(exc, "message", str(exc)), "see whether it is up: pdmesh status"
        )
        if own is not None:  # a bad certificate may be the cause
            for each in await examine_ports(own, ports_of((), own.identity, nats_url)):
                yield each
        return
    if own is not None:
        for each in await examine_ports(own, ports_of(records.values(), own.identity, nats_url)):
            yield each
    yield of_leader(seen.leader_epoch)
    for group in (
        of_services(record.service for record in records.values()),
        [of_versions({name: record.version for name, record in records.items()})],
        of_health(_healths(seen), status.down(seen)),
        (problem("pairs", text, "give both the same settings and files") for text in seen.warnings),
        of_clocks(ahead_s),
    ):
        for each in group:
            yield each


def _healths(seen: status.Status) -> dict[str, str]:
    """The health of the ready instances, and the phase of the failed ones, by id."""
    serving = {row.id: row.health for row in seen.rows if row.phase == "ready"}
    return serving | {row.id: row.phase for row in seen.rows if row.phase == "failed"}


async def _ahead_s(bus: NatsBus) -> dict[str, float]:
    """The seconds by which each process's clock is ahead of ours, by its heartbeats."""
    ahead: dict[str, float] = {}

    async def on_heartbeat(message: Message) -> None:
        header = decode_event(message, InstanceHealth).header
        ahead[header.publisher_id] = header.occurred_at.ToMicroseconds() / 1e6 - time.time()

    await bus.subscribe(subjects.health_instance(), on_heartbeat, on_gap=lambda: None)
    # This is long enough with the default lease: a process sends three heartbeats per lease.
    await asyncio.sleep(WATCHER_LEASE_S / 2)
    return ahead


def diagnoses_text(diagnoses: Iterable[Diagnosis]) -> str:
    marks = {Grade.OK: "ok  ", Grade.WARNING: "warn", Grade.PROBLEM: "FAIL"}
    lines: list[str] = []
    for each in diagnoses:
        lines.append(f"{marks[each.grade]}  {each.subject}: {each.text}")
        if each.remedy:
            lines.append(f"        -> {each.remedy}")
    return "\n".join(lines)
