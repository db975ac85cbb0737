"""Two groups of vLLM get another revision under load, one after the other (S24).

No text changes, and no request fails.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from pdmesh.launcher.mesh import Mesh
from pdmesh.net.nats.bus import NatsBus
from tests.e2e.conftest import Reference
from tests.e2e.mesh.test_equality import ask_all, texts
from tests.e2e.mesh.test_substitution import LOAD_S, ask_until, spec
from tests.support.sites.operator import Operator
from tests.support.waiting import until

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.nightly,
    pytest.mark.timeout(1800),
    pytest.mark.filterwarnings("default"),  # vLLM emits warnings
    pytest.mark.asyncio(loop_scope="session"),
]
NUM_CASES = 12


def desired(num_slots: int) -> str:
    """A desired state. Each number of slots makes another revision.

    Instances of different revisions exchange no KV.
    """
    return f"""
services:
  smollm2: {{options: {{num_slots: {num_slots}}}}}
scenarios:
  default:
    service: smollm2
    # A load uses both cores, so slower requests in that time do not count against the revision.
    upgrade: {{soak_s: 5, max_slowdown: 1000}}
groups:
  chat: {{count: 2, prefill: 1, decode: 1}}
"""


@pytest.mark.req("S24")
async def test_two_groups_of_vllm_get_another_revision_under_load_and_the_text_stays(
    model_dir: Path, reference: Reference, tmp_path: Path
) -> None:
    todo, expected = reference.cases[:NUM_CASES], texts(model_dir, reference.tokens[:NUM_CASES])
    file = tmp_path / "groups.yaml"
    file.write_text(desired(8))
    async with Mesh(spec(model_dir, file, num_blank=6), tmp_path / "mesh", report=print) as mesh:
        bus = await NatsBus.connect(mesh.nats_url, "test")
        operator = Operator(bus)
        await operator.listen()
        await until(lambda: running(operator), within_s=LOAD_S)
        (before,) = await running(operator)
        pids = {name: mesh.pid(name) for name in mesh.names}
        assert await ask_all(mesh.http_url, todo, 2) == expected

        is_over = asyncio.Event()
        load = asyncio.create_task(ask_until(is_over, mesh.http_url, todo))
        await operator.apply(desired(6))
        await until(lambda: told(operator)[-1:] in (["done"], ["went_back"]), within_s=2 * LOAD_S)
        is_over.set()
        rounds = await load
        assert told(operator) == [
            "begun", "changing chat-0", "proved chat-0", "changing chat-1", "proved chat-1", "done",
        ]  # fmt: skip
        await until(lambda: running(operator), within_s=LOAD_S)
        (after,) = await running(operator)
        assert after != before
        assert rounds
        assert all(answers == expected for answers in rounds)
        assert await ask_all(mesh.http_url, todo, 2) == expected
        # Each process continues with a new incarnation.
        assert {name: mesh.pid(name) for name in pids} == pids
        await bus.close()


async def running(operator: Operator) -> set[str]:
    """The revision of all members. Empty unless both groups serve with one revision."""
    await asyncio.sleep(0.2)  # so that repeated queries do not load the machine
    states = (await operator.groups()).groups
    found = {member.revision for group in states for member in group.members}
    return found if [g.state for g in states] == ["serving"] * 2 and len(found) == 1 else set()


def told(operator: Operator) -> list[str]:
    return [f"{step.step} {step.group_id}".strip() for step in operator.upgrades]
