"""Sends a mesh four times as many users as its decode has KV memory for (F36). Accepted requests
must be answered whole, and the others must be told when to come back.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator

import httpx
import pytest
import pytest_asyncio

from pdmesh.launcher.mesh import Mesh
from tests.support.memory import rss_bytes
from tests.support.sites import fleet
from tests.support.streams import StreamOutcome, stream_completion
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

TTFT_S, RUN_S = 3.0, 8.0
NUM_TOKENS = 40
PROMPT_TOKENS = 200
HANGS_AFTER_S = 60.0
ROOM = 4  # the number of requests that fit into the decode's KV blocks, with prompt and answer
CODES = {"overloaded", "ttft_unreachable", "queue_full"}
PROCESSES = ("gateway-0", "prefill-0", "decode-0", "master-scheduler")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Mesh]:
    num_blocks = ROOM * -(-(PROMPT_TOKENS + NUM_TOKENS) // 64)
    spec = fleet.one_by_one(
        PDMESH_SIM_LAW="smollm2-cpu",
        PDMESH_PREFILL_NUM_SLOTS="2",
        PDMESH_DECODE_NUM_SLOTS="64",
        PDMESH_DECODE_NUM_KV_BLOCKS=str(num_blocks),
        PDMESH_GATEWAY_TTFT_S=str(TTFT_S),
    )
    async with Mesh(spec, tmp_path_factory.mktemp("mesh")) as running:
        yield running


@pytest.mark.fault("F36")
@pytest.mark.req("S44", "S95")
async def test_a_load_of_four_times_the_kv_memory_gets_answers_and_timely_429s(mesh: Mesh) -> None:
    """The test first runs as many users as there is room for, then four times as many. In the
    second run, the mesh must give at least 0.4 times the answers per second of the first run. It
    must refuse all other requests before the client's timeout.
    """
    reference = fleet.Reference.load(mesh.state_dir / "reference")
    memory = {name: rss_bytes(mesh, name) for name in PROCESSES}
    async with httpx.AsyncClient(timeout=HANGS_AFTER_S) as client:

        async def ask(number: int) -> StreamOutcome:
            prompt = [40 + (number * 13 + i * i) % 80 for i in range(PROMPT_TOKENS)]
            return await stream_completion(
                client, mesh.http_url, prompt, NUM_TOKENS, ignore_eos=True
            )

        async def serve(num_users: int) -> tuple[list[StreamOutcome], float]:
            outcomes: list[StreamOutcome] = []
            began = time.monotonic()

            async def user(number: int) -> None:
                while time.monotonic() < began + RUN_S:
                    outcomes.append(await ask(number))
                    number += 100

            await asyncio.gather(*(user(n) for n in range(num_users)))
            num_done = sum(o.is_complete for o in outcomes)
            return outcomes, num_done / (time.monotonic() - began)

        _, peace_per_s = await serve(ROOM)
        outcomes, done_per_s = await serve(4 * ROOM)
        assert (await ask(7)).is_complete, "it recovers at once"
    done = [o for o in outcomes if o.is_complete]
    refused = [o for o in outcomes if not o.is_complete]
    for outcome in done:
        assert outcome.text == reference.text([*outcome.prompt], NUM_TOKENS)
    assert Counter(o.status for o in refused) == {429: len(refused)}, refused
    assert {(o.error or {})["code"] for o in refused} <= CODES
    assert all(int(o.retry_after or 0) >= 1 for o in refused)
    waits = [o.ended_at - o.started_at for o in refused]
    assert refused, "there was room for all: the test proves nothing"
    print(
        f"{done_per_s:.2f} a second answered, {peace_per_s:.2f} of as many users as there is room "
        f"for; {len(refused)} refused"
        f" after {statistics.median(waits):.3f} s ({min(waits):.3f} to {max(waits):.3f})"
    )
    assert done_per_s >= 0.4 * peace_per_s, "what was taken keeps the decode busy"
    await until(lambda: not slots_used(mesh))
    grown = {name: rss_bytes(mesh, name) - memory[name] for name in PROCESSES}
    assert max(grown.values()) < 64 << 20, grown


def slots_used(mesh: Mesh) -> float:
    names = ("prefill-0", "decode-0")
    return sum(v for p in names for n, _, v in fleet.samples(mesh, p) if n == "pdmesh_slots_used")
