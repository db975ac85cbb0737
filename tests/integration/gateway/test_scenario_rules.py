"""Tests rules for scenarios. A scenario is a kind of requests with its own groups of instances. A
rule gives a scenario to each request that names none.
"""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from pdmesh.events.v1.events_pb2 import RequestFinished
from pdmesh.v1.common_pb2 import InstanceRecord
from tests.fakes.fake_master import FakeMaster, leader_at, serving
from tests.fakes.gateway_mesh import GatewayMesh, gateway_mesh
from tests.support.waiting import until

RULES = [{"scenario": "long", "min_prompt_tokens": 50}]


UNCACHED = [{"scenario": "quick", "max_uncached_tokens": 40}, *RULES]


def serve_all_scenarios(mesh: GatewayMesh) -> None:
    for record in list(mesh.store.records.values()):
        if record.service == "master-scheduler":
            continue
        changed = InstanceRecord()
        changed.CopyFrom(record)
        changed.scenario = ""  # an empty scenario means all scenarios
        mesh.register(changed)


async def scenario_of(mesh: GatewayMesh, num_tokens: int, **more: str) -> str:
    """The scenario in which the mesh served a request with this number of tokens."""
    seen = len(mesh.events)
    body = {"model": "default", "prompt": [40] * num_tokens, "max_tokens": 2, **more}
    async with httpx.AsyncClient(timeout=60.0) as client:
        answer = await client.post(f"{mesh.url}/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    await until(lambda: len(mesh.events) > seen)
    event = mesh.events[-1]
    assert isinstance(event, RequestFinished)
    return event.scenario


@pytest.mark.req("S4")
async def test_a_request_without_a_label_is_classified_by_its_length(tmp_path: Path) -> None:
    async with gateway_mesh(tmp_path, scenario_rules=RULES) as mesh:
        serve_all_scenarios(mesh)
        assert await scenario_of(mesh, 10) == "default"
        assert await scenario_of(mesh, 50) == "long"
        assert await scenario_of(mesh, 50, scenario="mine") == "mine", "a label is kept"


@pytest.mark.req("S4", "S108")
async def test_a_rule_by_uncached_length_asks_the_master_what_the_scenario_holds(
    tmp_path: Path,
) -> None:
    master = FakeMaster()
    async with serving(master) as port, gateway_mesh(tmp_path, scenario_rules=UNCACHED) as mesh:
        serve_all_scenarios(mesh)
        mesh.register(leader_at(port))
        size = next(r.block_size for r in mesh.store.records.values() if r.block_size)
        num_tokens = 40 + 4 * size
        assert await scenario_of(mesh, 40) == "quick"
        assert master.matched == [], "a prompt that is short enough in any case asks nobody"
        assert await scenario_of(mesh, num_tokens) == "long"
        master.held = {"long": 4, "quick": 3}
        assert await scenario_of(mesh, num_tokens) == "long"
        master.held = {"quick": 4}
        assert await scenario_of(mesh, num_tokens) == "quick"
        assert master.matched == [num_tokens // size] * 3
        master.is_refusing = True
        assert await scenario_of(mesh, num_tokens) == "long", "unknown counts as not cached"
