"""A vLLM prefill dies under load, and a blank vLLM instance takes its place.

No text changes, and no other instance is affected (S35; issue D 4.4).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from pdmesh.launcher.mesh import Mesh
from pdmesh.launcher.spec import MeshSpec
from pdmesh.net.nats.bus import NatsBus
from pdmesh.v1.common_pb2 import ROLE_PREFILL
from tests.e2e.cases import Case
from tests.e2e.conftest import BLOCK_SIZE, DTYPE, Reference
from tests.e2e.mesh.test_equality import ask_all, texts
from tests.support.sites import fleet
from tests.support.sites.operator import Operator
from tests.support.waiting import until

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.nightly,
    pytest.mark.timeout(1200),
    pytest.mark.filterwarnings("default"),  # vLLM emits warnings
    pytest.mark.asyncio(loop_scope="session"),
]
NUM_CASES, NUM_CONCURRENT = 24, 4
LOAD_S = 600.0  # enough for three loads at once on two cores
GROUPS = """
scenarios:
  default: {allow_single: true}
groups:
  chat: {prefill: 2, decode: 1}
"""


def spec(model_dir: Path, groups_file: Path, num_blank: int = 4) -> MeshSpec:
    return MeshSpec(
        engine="vllm",
        num_prefill=0,
        num_decode=0,
        num_blank=num_blank,
        groups_file=groups_file,
        http_port=0,
        grpc_port=0,
        model_dir=model_dir,
        dtype=DTYPE,
        # A load uses both cores for a long time. Slow instances must not be judged dead in this
        # time.
        env={
            "PDMESH_BLOCK_SIZE": str(BLOCK_SIZE),
            "PDMESH_ENGINE_HUNG_S": "300",
            "PDMESH_GATEWAY_TTFT_S": "300",
            "PDMESH_GATEWAY_ANSWER_S": "30",
            "PDMESH_GATEWAY_STALL_S": "60",
            "PDMESH_TRANSFER_TIMEOUT_S": "60",
            "PDMESH_TICKET_LEASE_S": "60",
        },
        start_timeout_s=LOAD_S,
    )


def num_admitted(mesh: Mesh, name: str) -> float:
    found = fleet.samples(mesh, name)
    return sum(value for metric, _, value in found if metric == "pdmesh_admissions_total")


@pytest.mark.req("S35", "S36", "S73")
@pytest.mark.fault("F1", "F2")
async def test_a_blank_vllm_instance_takes_the_place_of_a_prefill_that_dies_under_load(
    model_dir: Path, reference: Reference, tmp_path: Path
) -> None:
    todo, expected = reference.cases[:NUM_CASES], texts(model_dir, reference.tokens[:NUM_CASES])
    file = tmp_path / "groups.yaml"
    file.write_text(GROUPS)
    async with Mesh(spec(model_dir, file), tmp_path / "mesh", report=print) as mesh:
        bus = await NatsBus.connect(mesh.nats_url, "test")
        operator = Operator(bus)
        await operator.listen()
        await until(lambda: is_whole(operator), within_s=LOAD_S)
        assert await ask_all(mesh.http_url, todo, NUM_CONCURRENT) == expected

        is_over = asyncio.Event()
        load = asyncio.create_task(ask_until(is_over, mesh.http_url, todo))
        lost, other = sorted(await operator.members(ROLE_PREFILL))
        await until(lambda: num_admitted(mesh, lost) > 0, within_s=60)
        pids = {name: mesh.pid(name) for name in mesh.names if name != lost}
        operator.steps.clear()
        mesh.kill(lost)
        await until(lambda: "lost" in operator.of(lost), within_s=60)
        await until(lambda: is_whole(operator), within_s=LOAD_S)
        (given,) = [s for s in operator.steps if s.step == "assigned"]
        assert (given.replaces, given.role) == (lost, "prefill")
        assert given.instance_id not in (lost, other)
        await until(lambda: num_admitted(mesh, given.instance_id) > 0, within_s=120)
        is_over.set()
        assert {name: mesh.pid(name) for name in pids} == pids
        rounds = await load
        assert rounds
        assert all(answers == expected for answers in rounds)
        await bus.close()


async def is_whole(operator: Operator) -> bool:
    states = (await operator.groups()).groups
    return [g.state for g in states] == ["serving"]


async def ask_until(is_over: asyncio.Event, url: str, todo: Sequence[Case]) -> list[list[str]]:
    """Send all cases again and again until the event is set. Return the answers of each round."""
    rounds: list[list[str]] = []
    while not is_over.is_set():
        rounds.append(await ask_all(url, todo, NUM_CONCURRENT))
    return rounds
