"""A decode of two data-parallel ranks on vLLM: both serve, one is killed under load, and the domain
is replaced as a whole while no text changes (S75, S121).

The model is dense, so each rank is an engine of its own: vLLM takes the external mode only for a
mixture of experts.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from pdmesh.launcher.mesh import Mesh
from pdmesh.net.nats.bus import NatsBus
from pdmesh.v1.common_pb2 import ROLE_DECODE
from tests.e2e.conftest import Reference
from tests.e2e.mesh.test_equality import ask_all, texts
from tests.e2e.mesh.test_substitution import (
    LOAD_S,
    NUM_CASES,
    NUM_CONCURRENT,
    ask_until,
    is_whole,
    num_admitted,
    spec,
)
from tests.support.sites.operator import Operator
from tests.support.waiting import until

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.nightly,
    pytest.mark.timeout(1200),
    pytest.mark.filterwarnings("default"),  # vLLM's own
    pytest.mark.asyncio(loop_scope="session"),
]
DOMAIN = """
services:
  default:
    dp_size: {decode: 2}
scenarios:
  default: {allow_single: true}
groups:
  chat: {prefill: 1, decode: 1}
"""


@pytest.mark.req("S35", "S75", "S121")
@pytest.mark.fault("F1", "F2")
async def test_a_domain_of_two_vllm_ranks_is_replaced_when_one_dies_under_load(
    model_dir: Path, reference: Reference, tmp_path: Path
) -> None:
    todo, expected = reference.cases[:NUM_CASES], texts(model_dir, reference.tokens[:NUM_CASES])
    file = tmp_path / "groups.yaml"
    file.write_text(DOMAIN)
    async with Mesh(spec(model_dir, file, 4), tmp_path / "mesh", report=print) as mesh:
        bus = await NatsBus.connect(mesh.nats_url, "test")
        operator = Operator(bus)
        await operator.listen()
        await until(lambda: is_whole(operator), within_s=LOAD_S)
        assert await ask_all(mesh.http_url, todo, NUM_CONCURRENT) == expected
        ranks = await operator.members(ROLE_DECODE)
        assert len(ranks) == 2
        assert all(num_admitted(mesh, rank) > 0 for rank in ranks), "placement goes to each rank"

        is_over = asyncio.Event()
        load = asyncio.create_task(ask_until(is_over, mesh.http_url, todo))
        operator.steps.clear()
        lost, survivor = ranks
        mesh.kill(lost)
        await until(lambda: [s for s in operator.steps if s.step == "lost"], within_s=60)
        await until(lambda: is_whole(operator), within_s=LOAD_S)
        assert operator.of(survivor)[0] == "broken_up"
        (given,) = [s for s in operator.steps if s.step == "assigned"]
        assert given.role == "decode"
        new = await operator.members(ROLE_DECODE)
        assert len(new) == 2
        await until(lambda: all(num_admitted(mesh, rank) > 0 for rank in new), within_s=120)
        is_over.set()
        rounds = await load
        assert rounds
        assert all(answers == expected for answers in rounds)
        await bus.close()
