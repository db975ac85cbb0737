"""A mesh whose instances are pipelines of two stages.

The death of one stage's process under load ends only its instance. Every answer must equal the
answer of plain vLLM, which is vLLM without the mesh.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import httpx
import pytest
import pytest_asyncio

from pdmesh.launcher.mesh import Mesh
from tests.e2e.mesh import test_faults_and_load as load
from tests.e2e.mesh.test_ranks import descendants
from tests.e2e.mesh.test_structured_output import RESTART_S, num_admitted
from tests.support.sites import fleet
from tests.support.sites.processes import is_alive
from tests.support.waiting import until

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.nightly,
    pytest.mark.timeout(1200),
    pytest.mark.filterwarnings("default"),  # vLLM emits warnings
    pytest.mark.asyncio(loop_scope="module"),
]
INSTANCES: Final = ("prefill-0", "decode-0", "decode-1")  # six workers in all
NUM_STAGES: Final = 2
model, expected, client = load.model, load.expected, load.client  # these are fixtures


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def staged(
    model: Path,
    expected: dict[tuple[int, ...], list[int]],
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Mesh]:
    env = {
        "PREFILL_PIPELINE_PARALLEL_SIZE": str(NUM_STAGES),
        "DECODE_PIPELINE_PARALLEL_SIZE": str(NUM_STAGES),
        "PREFILL_NUM_SLOTS": "16",
        "DECODE_NUM_SLOTS": "16",
        "PREFILL_KV_CACHE_BYTES": str(64 << 20),
        "DECODE_KV_CACHE_BYTES": str(64 << 20),
    }
    async with Mesh(load.spec(model, 1, 2, **env), tmp_path_factory.mktemp("staged")) as mesh:
        yield mesh


def stages_of(mesh: Mesh, name: str) -> list[int]:
    """The pids of an instance's workers, by stage."""
    found: dict[str, int] = {}
    for pid in descendants(mesh.pid(name)):
        title = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
        if "Worker_PP" in title:
            found[title] = pid
    assert len(found) == NUM_STAGES, found
    return [found[title] for title in sorted(found)]


@pytest.mark.req("S120", "S37")
async def test_a_mesh_of_pipelines_answers_as_plain_vllm(
    staged: Mesh, client: httpx.AsyncClient, expected: dict[tuple[int, ...], list[int]]
) -> None:
    async def moved_when_answered() -> float:
        """Send all streams, check the answers, and return the bytes of KV that have moved.

        An instance may lose its lease while six workers start to compute on two cores. Then the
        other instances answer, but no KV moves.
        """
        await staged.wait_ready(timeout_s=RESTART_S)
        outcomes = await asyncio.gather(*(load.ask(staged, client, p) for p in load.STREAMS))
        for outcome in outcomes:
            assert outcome.is_complete
            assert outcome.token_ids == expected[tuple(outcome.prompt)]
        return fleet.counted(staged, INSTANCES, "pdmesh_kv_transfer_bytes_total")

    await until(moved_when_answered, RESTART_S)
    assert all(num_admitted(staged, name) for name in INSTANCES)
    await fleet.until_nothing_held(staged, within_s=120)


@pytest.mark.req("S120", "S37", "S74")
@pytest.mark.fault("F1", "F7")
@pytest.mark.parametrize("stage", range(NUM_STAGES))
@pytest.mark.parametrize("victim", ["decode-0", "prefill-0"])
async def test_every_stream_ends_well_when_a_stage_dies(
    staged: Mesh,
    client: httpx.AsyncClient,
    expected: dict[tuple[int, ...], list[int]],
    victim: str,
    stage: int,
) -> None:
    """The instance ends with all its stages and comes back. Requests wait for the only prefill."""
    await staged.wait_ready(timeout_s=RESTART_S)
    enough, host = num_admitted(staged, victim) + 2, staged.pid(victim)
    workers = stages_of(staged, victim)
    streams = [asyncio.create_task(load.ask(staged, client, p)) for p in load.STREAMS * 2]
    await until(lambda: num_admitted(staged, victim) >= enough)
    os.kill(workers[stage], signal.SIGKILL)
    outcomes = await asyncio.wait_for(asyncio.gather(*streams), RESTART_S)
    await until(lambda: not any(map(is_alive, workers)), 60)  # no stage is left behind
    await until(lambda: staged.supervisor.pid(victim) != host, 120)
    await staged.wait_ready(timeout_s=RESTART_S)
    for outcome in outcomes:
        assert outcome.fault_in_ending() == ""
        assert outcome.is_complete, outcome
        assert outcome.token_ids == expected[tuple(outcome.prompt)]
    await fleet.until_nothing_held(staged, within_s=120)
    again = await asyncio.gather(*(load.ask(staged, client, p) for p in load.STREAMS[:4]))
    assert [o.token_ids for o in again] == [expected[p] for p in load.STREAMS[:4]]
