"""Requests without a scenario get one by a rule, and operators see by which rule."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from pdmesh.events.v1.events_pb2 import RequestFinished
from pdmesh.v1.common_pb2 import InstanceRecord
from tests.fakes.gateway_mesh import gateway_mesh
from tests.support.waiting import until

RULES = [{"scenario": "long", "min_prompt_tokens": 50}]


@pytest.mark.req("S4")
async def test_a_request_without_a_label_is_classified_by_its_length(tmp_path: Path) -> None:
    async with gateway_mesh(tmp_path, scenario_rules=RULES) as mesh, httpx.AsyncClient() as client:
        for record in list(mesh.store.records.values()):
            changed = InstanceRecord()
            changed.CopyFrom(record)
            changed.scenario = ""  # an empty scenario means that it serves all of them
            mesh.register(changed)

        async def ask(num_tokens: int, **more: str) -> str:
            seen = len(mesh.events)
            body = {"model": "default", "prompt": [40] * num_tokens, "max_tokens": 2, **more}
            answer = await client.post(f"{mesh.url}/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            await until(lambda: len(mesh.events) > seen)
            event = mesh.events[-1]
            assert isinstance(event, RequestFinished)
            return event.scenario

        assert await ask(10) == "default"
        assert await ask(50) == "long"
        assert await ask(50, scenario="mine") == "mine", "a scenario named by the client is kept"
