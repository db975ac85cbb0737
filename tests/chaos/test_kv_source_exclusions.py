"""KV between some instances is corrupt or lost again and again, and the mesh excludes its source.

Clients must still get their text. The mesh has two prefills and two decodes on the simulated
engine, as processes. After a round without faults, one instance is restarted with a failpoint. A
decode that excludes a prefill reports this in its record and as an event. The master respects the
exclusion, and so does a gateway without a master. No good instance is excluded.
"""

from __future__ import annotations

import random
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from pdmesh.launcher.mesh import Mesh
from pdmesh.launcher.spec import MeshSpec
from tests.support import kv_bounds
from tests.support.sites import fleet
from tests.support.waiting import until
from tests.support.watch import Watch

pytestmark = pytest.mark.timeout(180)

MAX_TOKENS = 6
PULL_S = 1.0
F23_S = 3.0  # what F23 may add to the silence without faults; F34 may double the silence
LOST = {
    "asking": "requests",
    "hearing": "answers",
    "both ways": "all messages",
}


@dataclass
class Asked:
    """A mesh with a watch, and the longest silence of a client in each round."""

    watch: Watch
    streams: fleet.Streams
    gaps_s: list[float] = field(default_factory=list)

    async def ask(self, n: int) -> None:
        """Send `n` requests at once. Each must get the right text."""
        self.watch.num_asked += n
        self.gaps_s.append(await self.streams.longest_gap_s(n, MAX_TOKENS))

    async def peace_s(self, n: int) -> float:
        """The longest silence in three rounds of `n` requests. These rounds are not recorded."""
        for _ in range(3):
            await self.ask(n)
        longest_s = max(self.gaps_s)
        self.gaps_s.clear()
        return longest_s


@asynccontextmanager
async def watched_mesh(spec: MeshSpec, directory: Path, seed: int) -> AsyncIterator[Asked]:
    reference, rng = fleet.Reference.load(directory / "model"), random.Random(seed)
    async with (
        Mesh(spec, directory / "mesh") as mesh,
        httpx.AsyncClient(timeout=60) as client,
        Watch(mesh).on() as watch,
    ):
        yield Asked(watch, fleet.Streams(client, mesh, reference, rng, (100, 400)))


@pytest.mark.fault("F34")
@pytest.mark.req("S53")
async def test_a_prefill_that_corrupts_kv_is_excluded_until_its_next_incarnation(
    tmp_path: Path,
) -> None:
    """In each message from prefill-0, the first bytes are flipped after the checksum was made, as
    faulty memory would do.
    """
    async with watched_mesh(fleet.two_by_two(), tmp_path, 34) as asked:
        watch, mesh = asked.watch, asked.watch.mesh
        peace_s = await asked.peace_s(12)
        await fleet.arm(mesh, "prefill-0", "prefill.sending=corrupt", stays=True)

        everyone = {(d, "prefill-0", "KV_CORRUPT") for d in ("decode-0", "decode-1")}
        while watch.excluded() != everyone:
            await asked.ask(4)
        await until(lambda: watch.num_errors("KV_SOURCE_EXCLUDED") == 2)
        num_corrupt = watch.num_errors("KV_CORRUPT")
        mark = await watch.all_told()
        await asked.ask(12)
        pairs = await watch.pairs_since(mark, 12)
        assert {prefill for prefill, _ in pairs} == {"prefill-1"}
        assert {decode for _, decode in pairs} == {"decode-0", "decode-1"}, "no decode is excluded"
        assert watch.num_errors("KV_CORRUPT") == num_corrupt
        assert fleet.counted(mesh, ["decode-0"], "pdmesh_kv_sources_excluded") == 1
        what = "prefill-0 sends corrupt KV, until no decode asks it"
        kv_bounds.judge(
            "F34", what, peace_s=peace_s, took_s=max(asked.gaps_s), bound_s=round(peace_s, 2)
        )

        mesh.kill("master-scheduler", signal.SIGSTOP)  # the gateway ranks instances itself
        await asked.ask(6)
        assert watch.num_errors("KV_CORRUPT") == num_corrupt
        mesh.kill("master-scheduler", signal.SIGCONT)

        before = mesh.pid("prefill-0")
        mesh.kill("prefill-0", signal.SIGKILL)
        await until(lambda: mesh.supervisor.pid("prefill-0") not in (None, before))
        await mesh.wait_ready(["prefill-0"], timeout_s=30)
        while watch.num_errors("KV_CORRUPT") == num_corrupt:
            await asked.ask(4)  # the next incarnation is trusted until its fault is detected


@pytest.mark.fault("F23")
@pytest.mark.parametrize(
    ("mode", "lost"),
    [("whole", "asking"), ("per_layer", "asking"), ("whole", "hearing"), ("whole", "both ways")],
)
async def test_a_pair_that_cannot_exchange_is_avoided_as_a_pair(
    tmp_path: Path, mode: str, lost: str
) -> None:
    """All requests from decode-0 to prefill-0 are lost, or all answers, but both can reach all
    other instances. For the mesh, this is a cut link.
    """
    ways = ["asking", "hearing"] if lost == "both ways" else [lost]
    failpoint = ",".join(f"decode.{way}[prefill-0]=drop" for way in ways)
    spec = fleet.two_by_two(PDMESH_KV_TRANSFER=mode, PDMESH_DECODE_TRANSFER_TIMEOUT_S=str(PULL_S))
    async with watched_mesh(spec, tmp_path, 23) as asked:
        watch = asked.watch
        peace_s = await asked.peace_s(8)
        await fleet.arm(watch.mesh, "decode-0", failpoint)
        cut = ("decode-0", "prefill-0", "KV_UNREACHABLE")
        while cut not in watch.excluded():
            await asked.ask(4)
        assert watch.excluded() == {cut}, "no other source is excluded"
        num_failed = watch.num_errors("KV_TRANSFER_FAILED")
        mark = await watch.all_told()
        for _ in range(3):
            await asked.ask(8)
        pairs = await watch.pairs_since(mark, 24)
        assert ("prefill-0", "decode-0") not in pairs
        assert {prefill for prefill, _ in pairs} == {"prefill-0", "prefill-1"}, (
            "no instance is excluded"
        )
        assert {decode for _, decode in pairs} == {"decode-0", "decode-1"}
        assert watch.num_errors("KV_TRANSFER_FAILED") == num_failed, "no storm of retries"
        what = f"{LOST[lost]} between decode-0 and prefill-0 are lost, {mode}"
        kv_bounds.judge("F23", what, peace_s=peace_s, took_s=max(asked.gaps_s), bound_s=F23_S)
