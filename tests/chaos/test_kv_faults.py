"""A prefill or decode dies or freezes at a chosen moment of a KV hand-over.

Every client must still get its text within the fault's bound. The mesh has two prefills and two
decodes on the simulated engine. The KV of a prompt is large enough for several ranges, which are
the pieces of a transfer. KV is handed over whole or per layer, and each mode has one mesh for all
its cases. A case begins with a round of streams without a fault. Then one prefill or decode is
restarted with a failpoint, and rounds of the same kind run until the failpoint is hit.
"""

from __future__ import annotations

import random
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from pdmesh.core.control.restart_policy import RestartPolicy
from pdmesh.engine.sim.model import SimParams
from pdmesh.launcher.mesh import Mesh
from tests.support import kv_bounds
from tests.support.sites import fleet
from tests.support.waiting import until
from tests.support.watch import Watch

pytestmark = pytest.mark.timeout(180)

NUM_STREAMS, MAX_TOKENS = 8, 12
# A failpoint must be hit within so many rounds. Perhaps few requests of a round pass it.
MAX_ROUNDS = 5
QUIESCE_S = 14.0  # the ticket lease of 10 s, the registry lease of 3 s, and a little more
PARAMS = SimParams(num_layers=8, token_bytes=512)
KV = {"PDMESH_SIM_NUM_LAYERS": "8", "PDMESH_SIM_TOKEN_BYTES": "512"}
# so many restarts are allowed because all cases kill processes of one mesh
NEVER_GIVEN_UP = RestartPolicy(base_delay_s=0.0, max_deaths=1000)


@dataclass(frozen=True)
class Site:
    mesh: Mesh
    streams: fleet.Streams
    mode: str


@dataclass(frozen=True)
class Case:
    """A client may wait `bound_s` longer than without the fault."""

    fault: str
    victim: str
    failpoint: str
    bound_s: float
    ends: str = "dies"  # dies, freezes or lives

    def __str__(self) -> str:
        return f"{self.fault}-{self.victim}-{self.failpoint}"


# At prefill.staged, the KV of a whole prompt is staged, but no byte of it has been sent.
WHOLE = [
    Case("F2", "prefill-0", "prefill.staged=sigkill@1", 3.0),
    Case("F6", "decode-0", "decode.range=sigkill@1", 3.0),
    Case("F6", "decode-0", "decode.range=sigkill@3", 3.0),
]
PER_LAYER = [
    *(Case("F2", "prefill-0", f"prefill.layer=sigkill@{n}", 3.0) for n in (1, 4, 8)),
    Case("F2", "prefill-0", "prefill.staged=sigkill@1", 3.0),
    Case("F4", "prefill-0", "prefill.layer=sigstop@4", 3.5, ends="freezes"),
    Case("F6", "decode-0", "decode.range=sigkill@1", 3.0),
    Case("F6", "decode-0", "decode.range=sigkill@3", 3.0),
    Case("F25", "prefill-0", "prefill.sending=cut@5", 3.0, ends="lives"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Site]:
    mode, directory = str(request.param), tmp_path_factory.mktemp("site")
    reference = fleet.Reference.load(directory / "model", PARAMS)
    spec = fleet.two_by_two({}, PDMESH_KV_TRANSFER=mode, **KV)
    async with (
        Mesh(spec, directory / "mesh", policy=NEVER_GIVEN_UP) as mesh,
        httpx.AsyncClient(timeout=60) as client,
    ):
        streams = fleet.Streams(client, mesh, reference, random.Random(mode), (600, 1200))
        yield Site(mesh, streams, mode)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.fault("F3")
@pytest.mark.parametrize("site", ["whole"], indirect=True)
async def test_the_loss_of_a_prefill_before_the_acknowledgement_does_not_repeat_the_prompt(
    site: Site,
) -> None:
    """The prefill dies when the acknowledgement arrives, before the prefill handles it. To all
    others, the prefill has died without an acknowledgement.
    """
    mesh, streams = site.mesh, site.streams
    others = ("prefill-1", "decode-0", "decode-1")
    peace_s = max([await streams.longest_gap_s(1, MAX_TOKENS) for _ in range(NUM_STREAMS)])
    pid = await fleet.arm(mesh, "prefill-0", "prefill.acked=sigkill@1")
    async with Watch(mesh).on() as watch:
        for number in count(1):
            num_prefills = fleet.counted(
                mesh, ["prefill-1"], "pdmesh_admissions_total", outcome="accepted"
            )
            gap_s = await streams.longest_gap_s(1, MAX_TOKENS)
            await until(lambda: len(watch.finished) == number)  # noqa: B023
            if mesh.supervisor.pid("prefill-0") != pid:
                break
            assert number < NUM_STREAMS, "the failpoint was not hit"
        last = watch.finished[-1]
    assert (last.prefill_id, last.num_migrations, last.num_rejections) == ("prefill-0", 0, 0)
    num_prefills_now = fleet.counted(
        mesh, ["prefill-1"], "pdmesh_admissions_total", outcome="accepted"
    )
    assert num_prefills_now == num_prefills, "the prompt was computed twice"
    assert fleet.counted(mesh, others, "pdmesh_kv_computed_tokens_total") == 0
    await mesh.wait_ready(timeout_s=30)
    await fleet.until_nothing_held(mesh, QUIESCE_S)
    what = "prefill-0 at prefill.acked=sigkill@1, whole"
    kv_bounds.judge("F3", what, peace_s=peace_s, took_s=gap_s, bound_s=0.5)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.req("S48", "S74")
@pytest.mark.fault("F2", "F6")
@pytest.mark.parametrize("case", WHOLE, ids=str)
@pytest.mark.parametrize("site", ["whole"], indirect=True)
async def test_every_stream_ends_well(site: Site, case: Case) -> None:
    await check(site, case)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.req("S48", "S74")
@pytest.mark.fault("F2", "F4", "F6", "F25")
@pytest.mark.parametrize("case", PER_LAYER, ids=str)
@pytest.mark.parametrize("site", ["per_layer"], indirect=True)
async def test_every_stream_ends_well_per_layer(site: Site, case: Case) -> None:
    await check(site, case)


async def check(site: Site, case: Case) -> None:
    mesh, streams = site.mesh, site.streams
    peace_s = await streams.longest_gap_s(NUM_STREAMS, MAX_TOKENS)
    pid = await fleet.arm(mesh, case.victim, case.failpoint)
    failed = num_failed(mesh)
    for number in count(1):
        gap_s = await streams.longest_gap_s(NUM_STREAMS, MAX_TOKENS)
        if await is_met(mesh, case, pid, failed):
            break
        assert number < MAX_ROUNDS, "the failpoint was not hit"
    if case.ends == "freezes":
        mesh.kill(case.victim, signal.SIGCONT)  # late messages of the process reach nobody
    await mesh.wait_ready(timeout_s=30)
    await fleet.until_nothing_held(mesh, QUIESCE_S)
    what = f"{case.victim} at {case.failpoint}, {site.mode}"
    kv_bounds.judge(case.fault, what, peace_s=peace_s, took_s=gap_s, bound_s=case.bound_s)


async def is_met(mesh: Mesh, case: Case, pid: int, num_failed_before: float) -> bool:
    match case.ends:
        case "dies":
            return mesh.supervisor.pid(case.victim) != pid
        case "freezes":
            return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"
        case _:
            return num_failed(mesh) > num_failed_before


def num_failed(mesh: Mesh) -> float:
    decodes = ("decode-0", "decode-1")
    return fleet.counted(mesh, decodes, "pdmesh_kv_transfer_failures_total")
