"""Tests data-parallel domains as real processes. A domain is a set of instances, its ranks, that
compute one model together.

Domains form out of blank instances. When a rank dies, the whole domain must be replaced, and
clients may only notice a wait (S75, S121).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import httpx
import pytest

from pdmesh.cli.commands.look import status
from pdmesh.launcher.mesh import Mesh
from pdmesh.net.nats.bus import NatsBus
from pdmesh.net.nats.registry import NatsRegistry
from pdmesh.v1 import admin_service_pb2 as pb
from pdmesh.v1.common_pb2 import INSTANCE_PHASE_READY, ROLE_DECODE, InstanceRecord
from tests.support.sites import fleet
from tests.support.sites.groups import spec
from tests.support.sites.operator import CHANGE_S, Operator
from tests.support.streams import StreamOutcome, stream_completion
from tests.support.waiting import until

NUM_CLIENTS, NUM_TOKENS = 6, 60
DOMAINS = """
services:
  default:
    dp_size: {decode: 2}
groups:
  chat: {prefill: 2, decode: 2}
"""


def by_domain(records: Mapping[str, InstanceRecord]) -> dict[str, list[str]]:
    """The ready decodes of each domain, in the order of their ranks."""
    ready = [
        r
        for r in records.values()
        if (r.role, r.phase) == (ROLE_DECODE, INSTANCE_PHASE_READY) and r.domain.domain_id
    ]
    found: dict[str, list[str]] = {}
    for record in sorted(ready, key=lambda r: r.domain.dp_rank):
        found.setdefault(record.domain.domain_id, []).append(record.instance_id)
    return found


@pytest.mark.timeout(300)
@pytest.mark.req("S35", "S75", "S121")
@pytest.mark.fault("F1")
async def test_the_death_of_one_rank_replaces_its_domain_and_every_answer_is_whole(
    tmp_path: Path,
) -> None:
    reference = fleet.Reference.load(tmp_path / "model")
    file = tmp_path / "groups.yaml"
    file.write_text(DOMAINS)
    async with Mesh(spec(file, num_blank=7), tmp_path / "mesh") as mesh:
        bus = await NatsBus.connect(mesh.nats_url, "test")
        view = await NatsRegistry(bus, 3.0).watch()
        operator = Operator(bus)
        await operator.listen()
        await operator.until_serving(2, 4)
        before = by_domain(view.records)
        assert [len(ranks) for ranks in before.values()] == [2, 2]
        for domain_id, ranks in before.items():
            first = view.records[ranks[0]]
            assert [view.records[i].domain.dp_rank for i in ranks] == [0, 1]
            assert {view.records[i].domain.address for i in ranks} == {first.domain.address}
            assert all(view.records[i].domain.dp_size == 2 for i in ranks), domain_id
        await _check_status(mesh, before)

        (broken, lost_ranks), (whole, kept_ranks) = before.items()
        lost, survivor = lost_ranks
        pids = {name: mesh.pid(name) for name in mesh.names if name != lost}
        incarnations = {i: r.incarnation for i, r in view.records.items()}
        operator.steps.clear()
        async with asking_long(mesh.http_url) as outcomes:
            await until(lambda: num_admitted(mesh, lost) > 4, within_s=CHANGE_S)
            mesh.kill(lost)
            await until(lambda: "lost" in operator.of(broken), within_s=CHANGE_S)
            await operator.until_serving(2, 4)
            num_before = len(outcomes)
            await until(lambda: len(outcomes) > num_before + 10, within_s=CHANGE_S)
        assert [o for o in outcomes if not o.is_complete] == []
        expected = [reference.text(list(o.prompt), NUM_TOKENS) for o in outcomes]
        assert [o.text for o in outcomes] == expected

        after = by_domain(view.records)
        assert after[whole] == kept_ranks
        assert broken not in after
        (assigned,) = [s for s in operator.steps if s.step == "assigned"]
        assert assigned.replaces == broken
        (new,) = after.keys() - {whole}
        assert assigned.instance_id == new
        assert operator.of(survivor)[0] == "broken_up"
        assert view.records[survivor].incarnation != incarnations[survivor]
        assert {name: mesh.pid(name) for name in pids} == pids, "no other process was touched"
        await _cordon(operator, view.records, new, whole)
        await view.close()
        await bus.close()


@contextlib.asynccontextmanager
async def asking_long(url: str) -> AsyncIterator[list[StreamOutcome]]:
    """Stream long answers one after another until the `async with` block ends. Yields the list of
    the finished streams.
    """
    outcomes: list[StreamOutcome] = []
    is_over = asyncio.Event()

    async def ask(client: httpx.AsyncClient, number: int) -> None:
        for turn in itertools.count():
            if is_over.is_set():
                return
            prompt = [40 + (i * 7 + number + 13 * turn) % 80 for i in range(50 + 37 * number)]
            outcomes.append(
                await stream_completion(client, url, prompt, NUM_TOKENS, ignore_eos=True)
            )

    async with httpx.AsyncClient(timeout=60) as client, asyncio.TaskGroup() as clients:
        for number in range(NUM_CLIENTS):
            clients.create_task(ask(client, number))
        try:
            yield outcomes
        finally:
            is_over.set()


def num_admitted(mesh: Mesh, name: str) -> float:
    found = fleet.samples(mesh, name)
    return sum(value for metric, _, value in found if metric == "pdmesh_admissions_total")


async def _cordon(
    operator: Operator, records: Mapping[str, InstanceRecord], gone: str, kept: str
) -> None:
    """Cordon one rank, and check that other instances replace its whole domain."""
    out = by_domain(records)[gone][1]
    await operator.cordon(out, pb.LEAVE_MODE_AT_ONCE)
    await until(lambda: gone not in by_domain(records), within_s=CHANGE_S)
    await operator.until_serving(2, 4)
    assert kept in by_domain(records)
    assert all(out not in ranks for ranks in by_domain(records).values())


async def _check_status(mesh: Mesh, domains: Mapping[str, list[str]]) -> None:
    """Check that `pdmesh status` shows domain and rank, and counts a domain as one member."""
    options = argparse.Namespace(nats_url=None, state_dir=mesh.state_dir)
    shown = await status.collect(options)
    ranks = {row.id: row.domain for row in shown.rows if row.domain}
    assert ranks == {
        instance_id: f"{domain_id} {dp_rank}/2"
        for domain_id, own in domains.items()
        for dp_rank, instance_id in enumerate(own)
    }
    assert [(group.wanted, group.ready) for group in shown.groups] == [("2P:2D", "2P:2D")]
