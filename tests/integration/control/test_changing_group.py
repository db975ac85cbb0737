"""Grows a group, changes the role of one instance and shrinks the group while clients stream from
it. No client may notice (S22, S25, S26).
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from pdmesh.launcher.mesh import Mesh
from pdmesh.launcher.spec import MeshSpec
from pdmesh.net.nats.assignments import NatsAssignments
from pdmesh.net.nats.bus import NatsBus
from pdmesh.net.nats.registry import NatsRegistry
from pdmesh.v1.common_pb2 import (
    INSTANCE_PHASE_CONNECTED,
    INSTANCE_PHASE_LOADED,
    INSTANCE_PHASE_READY,
    ROLE_DECODE,
    ROLE_PREFILL,
    Role,
)
from pdmesh.v1.groups_pb2 import STAGE_CONNECT, STAGE_SERVE
from tests.support.sites import fleet
from tests.support.sites.lone_master import Master
from tests.support.streams import StreamOutcome, stream_completion
from tests.support.waiting import until

NUM_CLIENTS, NUM_TOKENS = 6, 24
GROUP = {"group_id": "default", "revision": "", "model": ""}


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    spec = MeshSpec(
        engine="sim",
        num_prefill=1,
        num_decode=1,
        num_blank=2,
        http_port=0,
        grpc_port=0,
        env={"PDMESH_LEASE_S": "3.0"},
        start_timeout_s=180,
    )
    async with Mesh(spec, tmp_path / "mesh") as running:
        yield running


@pytest.fixture
async def master(mesh: Mesh) -> AsyncIterator[Master]:
    bus = await NatsBus.connect(mesh.nats_url, "test")
    view = await NatsRegistry(bus, 3.0).watch()
    book = await NatsAssignments(bus).book()
    yield Master(view, book, options={"num_slots": "8"})
    await book.close()
    await view.close()
    await bus.close()


async def join(master: Master, name: str, role: Role.ValueType) -> None:
    """Take an instance from blank to READY and connect it to the peers of the other role.

    The serving instances learn about the new one when it is CONNECTED, before it may serve.
    """
    others = [r for r in master.view.records.values() if r.phase == INSTANCE_PHASE_READY]
    others = [r for r in others if r.role in (ROLE_PREFILL, ROLE_DECODE) and r.role != role]
    await master.assign(name, role, **GROUP)
    await master.until(name, INSTANCE_PHASE_LOADED)
    await master.stage(name, STAGE_CONNECT, [master.peer(r.instance_id) for r in others])
    await master.until(name, INSTANCE_PHASE_CONNECTED)
    for record in others:
        other = record.instance_id
        if other not in master.given:
            await master.assign(other, record.role, stage=STAGE_SERVE, **GROUP)
        known = [p for p in master.given[other].peers if p.instance_id != name]
        await master.stage(other, STAGE_SERVE, [*known, master.peer(name)])
    await master.stage(name, STAGE_SERVE)
    await master.until(name, INSTANCE_PHASE_READY)


async def leave(master: Master, name: str) -> None:
    """Drain the instance, erase it, and make its peers forget it."""
    await master.erase(name)
    for other, assignment in master.given.items():
        if other != name:
            await master.stage(
                other, STAGE_SERVE, [p for p in assignment.peers if p.instance_id != name]
            )
    del master.given[name]


def served(mesh: Mesh, name: str) -> float:
    found = fleet.samples(mesh, name)
    return sum(v for metric, _, v in found if metric == "pdmesh_admissions_total")


@pytest.mark.req("S22", "S23", "S25", "S26")
@pytest.mark.fault("F41")
async def test_a_group_changes_under_load_and_no_request_fails(
    mesh: Mesh, master: Master, tmp_path: Path
) -> None:
    reference = fleet.Reference.load(tmp_path / "model")
    outcomes: list[StreamOutcome] = []
    is_over = False

    async def ask(client: httpx.AsyncClient, number: int) -> None:
        for turn in itertools.count():
            if is_over:
                return
            prompt = [40 + (i * 7 + number + 13 * turn) % 80 for i in range(50 + 37 * number)]
            outcomes.append(
                await stream_completion(client, mesh.http_url, prompt, NUM_TOKENS, ignore_eos=True)
            )

    async with httpx.AsyncClient(timeout=30) as client, asyncio.TaskGroup() as clients:
        for number in range(NUM_CLIENTS):
            clients.create_task(ask(client, number))
        await until(lambda: len(outcomes) > NUM_CLIENTS)
        try:
            pid = mesh.pid("instance-0")
            await join(master, "instance-0", ROLE_PREFILL)
            await join(master, "instance-1", ROLE_DECODE)
            await until(lambda: served(mesh, "instance-0") > 2)
            await until(lambda: served(mesh, "instance-1") > 2)
            await leave(master, "instance-0")
            before = served(mesh, "instance-0")
            await join(master, "instance-0", ROLE_DECODE)
            await until(lambda: served(mesh, "instance-0") > before + 2)
            await leave(master, "instance-1")
            assert mesh.pid("instance-0") == pid
        finally:
            is_over = True
    assert len(outcomes) > 3 * NUM_CLIENTS
    for outcome in outcomes:
        assert outcome.is_complete, outcome
        assert outcome.text == reference.text(list(outcome.prompt), NUM_TOKENS)
