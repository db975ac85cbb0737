"""KV that keeps arriving wrong, or not at all, between some instances of a mesh: clients get their text, and the mesh learns.

Two prefills and two decodes on the sim engine, as processes. The quarantine is told in the decode's record and as an event, both
the master and a gateway without a master go by it, and nobody loses an instance that is well.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from pdmesh.launcher.mesh import Mesh
from pdmesh.launcher.spec import MeshSpec
from tests.support import fleet
from tests.support.streams import stream_completion
from tests.support.waiting import until
from tests.support.watch import Watch

pytestmark = pytest.mark.timeout(180)

MAX_TOKENS = 6
PULL_S = 1.0
GAP_S = 12.0  # the 3 s that a fault may cost, and several times the TTFT that a loaded machine shows without any fault


@asynccontextmanager
async def watched_mesh(
    spec: MeshSpec, directory: Path
) -> AsyncIterator[tuple[httpx.AsyncClient, Watch]]:
    async with (
        Mesh(spec, directory / "mesh") as mesh,
        httpx.AsyncClient(timeout=60) as client,
        Watch(mesh).on() as watch,
    ):
        yield client, watch


async def ask(
    watch: Watch, client: httpx.AsyncClient, rng: random.Random, reference: fleet.Reference, n: int
) -> None:
    """`n` requests at once, each of which must end with the right text."""
    watch.num_asked += n
    prompts = [[rng.randrange(40, 120) for _ in range(rng.randrange(100, 400))] for _ in range(n)]
    outcomes = await asyncio.gather(
        *(
            stream_completion(client, watch.mesh.http_url, prompt, MAX_TOKENS, ignore_eos=True)
            for prompt in prompts
        )
    )
    for prompt, outcome in zip(prompts, outcomes, strict=True):
        assert outcome.is_complete, outcome
        assert outcome.text == reference.text(prompt, MAX_TOKENS)
        assert outcome.longest_gap_s <= GAP_S


@pytest.mark.fault("F34")
@pytest.mark.req("S53")
async def test_a_prefill_that_corrupts_kv_is_chosen_no_more_until_it_is_another(
    tmp_path: Path,
) -> None:
    """The first bytes of whatever prefill-0 sends are flipped after their checksum was made, as failing memory does."""
    reference, rng = fleet.Reference.load(tmp_path / "model"), random.Random(34)
    spec = fleet.two_by_two({"prefill-0": {"PDMESH_PREFILL_FAILPOINT": "prefill.sending=corrupt"}})
    async with watched_mesh(spec, tmp_path) as (client, watch):
        mesh = watch.mesh

        async def ask_some(count: int) -> None:
            await ask(watch, client, rng, reference, count)

        everyone = {(d, "prefill-0", "KV_CORRUPT") for d in ("decode-0", "decode-1")}
        while watch.held() != everyone:
            await ask_some(4)
        await until(lambda: watch.num_errors("KV_SOURCE_QUARANTINED") == 2)
        num_corrupt = watch.num_errors("KV_CORRUPT")
        mark = await watch.all_told()
        await ask_some(12)
        pairs = await watch.pairs_since(mark, 12)
        assert {prefill for prefill, _ in pairs} == {"prefill-1"}
        assert {decode for _, decode in pairs} == {"decode-0", "decode-1"}, "no decode is out"
        assert watch.num_errors("KV_CORRUPT") == num_corrupt
        assert _metric(mesh, "decode-0", "pdmesh_kv_sources_held") == 1

        mesh.kill("master-scheduler", signal.SIGSTOP)  # the gateway ranks by itself
        await ask_some(6)
        assert watch.num_errors("KV_CORRUPT") == num_corrupt
        mesh.kill("master-scheduler", signal.SIGCONT)

        before = mesh.pid("prefill-0")
        mesh.kill("prefill-0", signal.SIGKILL)
        await until(lambda: mesh.pid("prefill-0") not in (0, before), within_s=30)
        await mesh.wait_ready(["prefill-0"], timeout_s=30)
        while watch.num_errors("KV_CORRUPT") == num_corrupt:
            await ask_some(4)  # another incarnation is trusted again, and found out again


@pytest.mark.fault("F23")
@pytest.mark.parametrize("mode", ["whole", "per_layer"])
async def test_a_pair_that_cannot_exchange_is_avoided_as_a_pair(tmp_path: Path, mode: str) -> None:
    """What decode-0 asks of prefill-0 is lost, though both hear everybody else: a cut link, seen from the mesh."""
    reference, rng = fleet.Reference.load(tmp_path / "model"), random.Random(23)
    spec = fleet.two_by_two(
        {
            "decode-0": {
                "PDMESH_DECODE_FAILPOINT": "decode.asking[prefill-0]=drop",
                "PDMESH_DECODE_TRANSFER_TIMEOUT_S": str(PULL_S),
            }
        },
        PDMESH_KV_TRANSFER=mode,
    )
    async with watched_mesh(spec, tmp_path) as (client, watch):
        cut = ("decode-0", "prefill-0", "KV_UNREACHABLE")
        while cut not in watch.held():
            await ask(watch, client, rng, reference, 4)
        assert watch.held() == {cut}, "nobody else is in quarantine"
        num_failed = watch.num_errors("KV_TRANSFER_FAILED")
        mark = await watch.all_told()
        for _ in range(3):
            await ask(watch, client, rng, reference, 8)
        pairs = await watch.pairs_since(mark, 24)
        assert ("prefill-0", "decode-0") not in pairs
        assert {prefill for prefill, _ in pairs} == {"prefill-0", "prefill-1"}, "no worker is out"
        assert {decode for _, decode in pairs} == {"decode-0", "decode-1"}
        assert watch.num_errors("KV_TRANSFER_FAILED") == num_failed, "no storm of retries"


def _metric(mesh: Mesh, process: str, name: str) -> float:
    return sum(value for n, _, value in fleet.samples(mesh, process) if n == name)
