"""Two blank vLLM processes get roles and later swap them, and the text stays the same (S23)."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from pdmesh.engine.base import Sampling
from pdmesh.instance.incarnation import artefact
from pdmesh.net.nats.assignments import NatsAssignments
from pdmesh.v1.common_pb2 import ROLE_DECODE, ROLE_PREFILL
from tests.e2e.cases import Case
from tests.e2e.conftest import BLOCK_SIZE, DTYPE, Reference
from tests.fakes.sim_instances import TestSession, generate
from tests.support.sites.instance_site import Process, instance_site
from tests.support.sites.lone_master import Master, again, blank
from tests.support.waiting import until

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.nightly,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("default"),  # vLLM emits warnings
    pytest.mark.asyncio(loop_scope="session"),
]
NUM_CASES = 16
CONFIG = {"dtype": DTYPE, "block_size": str(BLOCK_SIZE), "max_model_len": "2048"}


async def ask_all(prefill: Process, decode: Process, cases: Sequence[Case]) -> list[list[int]]:
    async with TestSession(prefill) as to_p, TestSession(decode) as to_d:

        async def ask(case: Case) -> list[int]:
            sampling = Sampling(max_tokens=case.max_tokens, ignore_eos=True)
            tokens, _ = await generate(to_p, to_d, list(case.prompt), sampling)
            return tokens

        return [await ask(case) for case in cases]


@pytest.mark.req("S16", "S17", "S20", "S22", "S23")
async def test_two_processes_swap_roles_and_the_text_stays_the_same(
    model_dir: Path, reference: Reference, tmp_path: Path
) -> None:
    manifests = {
        role: artefact.build(model_dir, role, tmp_path / role, model="m", config=CONFIG)
        for role in ("prefill", "decode")
    }
    cases, expected = reference.cases[:NUM_CASES], reference.tokens[:NUM_CASES]
    async with instance_site(tmp_path) as site:
        book = await NatsAssignments(site.bus).book()
        master = Master(site.view, book, options={}, wait_s=300, manifests=manifests)
        env = {"ENGINE": "vllm", "NUM_SLOTS": "8"}
        a, b = await asyncio.gather(blank(site, "i-0", **env), blank(site, "i-1", **env))
        pids = a.child.pid, b.child.pid
        for prefill, decode in (("i-0", "i-1"), ("i-1", "i-0")):
            await master.set_up(prefill, decode)
            processes = {name: again(site, p) for name, p in (("i-0", a), ("i-1", b))}
            record = processes[decode].record
            assert [p.instance_id for p in record.verified_peers] == [prefill]
            assert record.load_timings.verify_ms > 0
            assert record.load_timings.build_ms > 0
            assert await ask_all(processes[prefill], processes[decode], cases) == expected
            for name in (prefill, decode):
                await master.erase(name)
        assert (a.child.pid, b.child.pid) == pids
        assert (a.child.returncode, b.child.returncode) == (None, None)
        await book.close()


def engine_processes(pid: int) -> list[int]:
    """The processes that vLLM has spawned from any thread of the process."""
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    found = [child for each in lists for child in each.read_text().split()]
    return [int(p) for p in found if b"spawn_main" in command_of(p)]


def command_of(pid: str) -> bytes:
    """The command line of a process. Empty if the process is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


@pytest.mark.req("S22", "S23")
@pytest.mark.fault("F37")
async def test_a_load_that_is_no_longer_needed_ends_and_leaves_no_process(
    model_dir: Path, tmp_path: Path
) -> None:
    """While vLLM starts its processes, the master withdraws the load. In a second load, the
    instance is stopped instead.
    """
    async with instance_site(tmp_path) as site:
        book = await NatsAssignments(site.bus).book()
        options = {"dtype": DTYPE, "block_size": str(BLOCK_SIZE)}
        master = Master(site.view, book, options=options, wait_s=120)
        process = await blank(site, "i-0", ENGINE="vllm", MODEL_DIR=str(model_dir), NUM_SLOTS="8")
        pid = process.child.pid
        await master.assign("i-0", ROLE_PREFILL)
        await until(lambda: engine_processes(pid), 120)
        await master.begin_anew("i-0")
        await until(lambda: not engine_processes(pid), 60)
        await master.assign("i-0", ROLE_DECODE)
        await until(lambda: engine_processes(pid), 120)
        left = engine_processes(pid)
        process.signal(signal.SIGTERM)
        assert await process.exit_code(60) == 0
        await until(lambda: not any(Path(f"/proc/{p}").exists() for p in left), 30)
        await book.close()
