"""Tests that a prefill gives its KV to every decode of its group, and to no other decode (S13)."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from pdmesh.engine.base import Sampling
from pdmesh.engine.factory import EngineSettings
from pdmesh.launcher.mesh import Mesh
from pdmesh.net.nats.bus import NatsBus
from pdmesh.net.nats.registry import NatsRegistry
from pdmesh.v1.common_pb2 import InstanceRecord
from tests.fakes.sim_instances import FUSION, TestSession, settings_of
from tests.support.sim_reference import sim_reference
from tests.support.sites import fleet

SAMPLING = Sampling(max_tokens=12, ignore_eos=True)
GROUPS = {"prefill-0": "a", "decode-0": "a", "prefill-1": "b", "decode-1": "b"}


@dataclass(frozen=True)
class Process:
    """An instance of the mesh, with the data that a gateway has of it."""

    address: str
    settings: EngineSettings

    @classmethod
    def of(cls, record: InstanceRecord) -> Process:
        name, incarnation = record.instance_id, record.incarnation
        return cls(record.grpc_address, settings_of(name, FUSION, incarnation=incarnation))


async def records(mesh: Mesh) -> Mapping[str, InstanceRecord]:
    bus = await NatsBus.connect(mesh.nats_url, "test")
    try:
        view = await NatsRegistry(bus, 3.0).watch()
        found = {i: view.records[i] for i in GROUPS}
        await view.close()
        return found
    finally:
        await bus.close()


@pytest.mark.req("S13")
async def test_a_prefill_refuses_its_kv_to_decodes_of_another_group(tmp_path: Path) -> None:
    """No gateway would pair these instances, so the test itself acts as a gateway."""
    groups = {name: {"PDMESH_GROUP_ID": group} for name, group in GROUPS.items()}
    async with Mesh(fleet.two_by_two(groups), tmp_path) as mesh, contextlib.AsyncExitStack() as on:
        found = await records(mesh)
        assert {name: record.group_id for name, record in found.items()} == GROUPS
        to = {
            name: await on.enter_async_context(TestSession(Process.of(record)))
            for name, record in found.items()
        }
        params = fleet.Reference.load(tmp_path / "model").params
        for number, (mine, other) in enumerate(((0, 1), (1, 0))):
            prompt = [40 + (7 * i + number) % 80 for i in range(200)]
            expected, _ = sim_reference(prompt, SAMPLING, params)
            prefill = await to[f"prefill-{mine}"].prefill(prompt, SAMPLING)
            first = await prefill.until("first_token")
            ask = (prompt, SAMPLING, first.token_id, first.ticket)
            refused = await to[f"decode-{other}"].start(*ask)
            failed = await refused.until("failed", "finished")
            assert failed.reason == "KV_TRANSFER_FAILED"
            assert "KV_REFUSED_WRONG_GROUP" in failed.message
            assert refused.tokens == []
            # The ticket, the right to fetch the KV, must still be valid after the refusal.
            taken = await to[f"decode-{mine}"].start(*ask)
            await taken.until("failed", "finished")
            assert [first.token_id, *taken.tokens] == expected
        await fleet.until_nothing_held(mesh, 30)
