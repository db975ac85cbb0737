"""Runs a group of simulated pooling instances, which turn texts into vectors, as processes of a
mesh. The group forms, loses an instance under load and becomes whole again, and no answer may be
lost.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx

from pdmesh.events.v1.events_pb2 import RequestFinished
from pdmesh.launcher.mesh import Mesh
from pdmesh.launcher.spec import MeshSpec
from pdmesh.net import subjects
from pdmesh.net.bus import Message
from pdmesh.net.events import decode_event
from pdmesh.net.nats.bus import NatsBus
from pdmesh.net.nats.registry import NatsRegistry
from pdmesh.v1.common_pb2 import INSTANCE_PHASE_READY, ROLE_POOLING
from tests.support.waiting import PATIENCE_S, until

GROUPS = """
services:
  chat: {model: chat}
  vectors: {model: vectors, options: {sim_dimensions: 8, sim_law: demo}}
scenarios:
  talk: {service: chat, allow_single: true}
  search: {service: vectors}
groups:
  talk: {scenario: talk, fusion: 1}
  search: {scenario: search, pooling: 2}
"""


def inputs_of(call: int) -> list[list[int]]:
    return [[40 + (call * 7 + i) % 80, 40 + i] for i in range(40)]


async def test_a_pooling_group_outlives_the_death_of_an_instance_under_load(
    tmp_path: Path,
) -> None:
    file = tmp_path / "groups.yaml"
    file.write_text(GROUPS)
    spec = MeshSpec(
        engine="sim", num_prefill=0, num_decode=0, num_blank=4, http_port=0, grpc_port=0,
        groups_file=file,
    )  # fmt: skip
    async with (
        Mesh(spec, tmp_path / "state") as mesh,
        httpx.AsyncClient(base_url=mesh.http_url, timeout=120) as client,
    ):
        bus = await NatsBus.connect(mesh.nats_url, "pooling-test")
        view = await NatsRegistry(bus, 3.0).watch()

        def members() -> dict[str, int]:
            """The pooling instances that take requests, with their incarnations."""
            return {
                r.instance_id: r.incarnation
                for r in view.records.values()
                if r.role == ROLE_POOLING and r.phase == INSTANCE_PHASE_READY
            }

        await until(lambda: len(members()) == 2)

        async def listed() -> list[str]:
            found = (await client.get("/v1/models")).json()["data"]
            return sorted(each["id"] for each in found)

        async def one(call: int) -> list[Any]:
            body = {"model": "vectors", "input": inputs_of(call)}
            answer = await client.post("/v1/embeddings", json=body)
            assert answer.status_code == 200, answer.text
            return [each["embedding"] for each in answer.json()["data"]]

        async with asyncio.timeout(PATIENCE_S):
            while await listed() != ["chat", "vectors"]:
                await asyncio.sleep(0.05)
        events: list[RequestFinished] = []

        async def hear(message: Message) -> None:
            events.append(decode_event(message, RequestFinished))

        await bus.subscribe(subjects.request_finished(), hear)
        before = [await one(call) for call in range(4)]
        assert {len(vector) for vector in before[0]} == {8}
        calls = [asyncio.create_task(one(call % 4)) for call in range(40)]
        await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        victim, incarnation = min(members().items())
        mesh.kill(victim)
        for call, got in enumerate(await asyncio.gather(*calls)):
            assert got == before[call % 4]
        await until(lambda: len(events) == 44)
        assert sum(event.num_migrations for event in events) > 0, "the death cost nothing: no proof"
        await until(lambda: members().get(victim) != incarnation and len(members()) == 2)
        assert await one(3) == before[3]
        await view.close()
        await bus.close()
