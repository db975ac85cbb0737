"""vLLM with two tensor-parallel ranks on each side: rank i of the decode pulls from rank i.

The loss of a rank ends its engine. SmolLM2's heads cannot be divided by two, so the model is a
small Llama with random weights.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from pdmesh.engine.base import Finished, KvReceived, Sampling
from pdmesh.engine.vllm.config import VllmConfig
from pdmesh.errors import EngineFailed
from tests.e2e.cases import VOCABULARY, Case, differences, generate_all
from tests.e2e.conftest import ASYNC_SCHEDULING, Plain, plain_vllm
from tests.e2e.pair import Pair, running
from tests.fakes.tiny_llama import write_tiny_llama
from tests.support.sites.processes import is_alive
from tests.support.waiting import until, wait_until

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.nightly,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("default"),  # vLLM emits warnings
    pytest.mark.asyncio(loop_scope="module"),
]
NUM_RANKS = 2
BLOCK_SIZE = 32


def rank_cases(seed: int = 5) -> list[Case]:
    rng = random.Random(seed)
    lengths = [1, 31, 32, 33, 64, 200, 333, *(rng.randint(2, 160) for _ in range(25))]
    return [Case(tuple(rng.choices(VOCABULARY, k=n)), rng.choice((2, 5, 8))) for n in lengths]


def config(model_dir: Path, instance_id: str, incarnation: int) -> VllmConfig:
    return VllmConfig(
        instance_id,
        incarnation,
        model_dir,
        "tiny",
        dtype="float32",
        block_size=BLOCK_SIZE,
        kv_cache_bytes=64 << 20,
        staging_bytes=32 << 20,
        landing_bytes=32 << 20,
        max_model_len=1024,
        tensor_parallel_size=NUM_RANKS,
        async_scheduling=ASYNC_SCHEDULING,
    )


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="module")
def plain_ranks(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plain]:
    with plain_vllm(
        tiny_llama,
        rank_cases(),
        tmp_path_factory.mktemp("plain-ranks"),
        block_size=BLOCK_SIZE,
        tensor_parallel_size=NUM_RANKS,
        max_model_len=1024,
        kv_cache_memory_bytes=64 << 20,
    ) as plain:
        yield plain


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ranks(tiny_llama: Path, plain_ranks: Plain) -> AsyncIterator[Pair]:
    await asyncio.to_thread(
        plain_ranks.tokens
    )  # six ranks at once would wait for each other's cores
    async with (
        running(config(tiny_llama, "prefill-0", 1)) as prefill,
        running(config(tiny_llama, "decode-0", 2)) as decode,
    ):
        yield Pair(prefill, decode)


@pytest.mark.req("S57", "S119", "S1")
async def test_two_ranks_hand_over_to_two_ranks_and_nothing_is_computed_twice(
    ranks: Pair, plain_ranks: Plain
) -> None:
    todo = rank_cases()
    got = await generate_all(ranks.generate, todo, num_concurrent=4)
    assert differences(plain_ranks.tokens(), got) == []
    assert ranks.num_handed_over == len(todo)
    assert ranks.num_computed_at_decode == 0
    await ranks.prefill.until_idle()
    await ranks.decode.until_idle()


@pytest.mark.req("S57")
async def test_each_rank_moves_its_own_shard_and_the_slowest_sets_the_time(ranks: Pair) -> None:
    """Rank 1 of the prefill is frozen.

    Pulls from it wait, but requests that already decode do not wait.
    """
    sampling = Sampling(max_tokens=4)
    prompt, other = (
        random.Random(seed).choices(VOCABULARY, k=length) for seed, length in ((9, 300), (10, 70))
    )
    first = await ranks.prefilled(prompt, sampling)
    running_first = await ranks.prefilled(other, Sampling(max_tokens=200))
    assert first.ticket is not None
    assert running_first.ticket is not None
    addresses = first.ticket.addresses
    assert len(set(addresses)) == NUM_RANKS
    assert set(addresses).isdisjoint(ranks.decode.info.kv_addresses)
    pids = [ranks.prefill.engine.worker_pids[rank] for rank in range(NUM_RANKS)]
    assert len(set(pids)) == NUM_RANKS

    busy = await ranks.start_decode(
        other, running_first.token, running_first.ticket, Sampling(max_tokens=200)
    )
    received = await ranks.decode.next_output(busy)
    assert isinstance(received, KvReceived)
    os.kill(pids[1], signal.SIGSTOP)
    try:
        slow = asyncio.create_task(ranks.decoded(prompt, first.token, first.ticket, sampling))
        num_steps = 0
        while not isinstance(await ranks.decode.next_output(busy), Finished):
            num_steps += 1
        assert num_steps > 50, "a running decode waited for another request's shard"
        assert not slow.done()
    finally:
        os.kill(pids[1], signal.SIGCONT)
    tokens = await slow
    del ranks.decode.legs[busy]
    assert len(tokens) == sampling.max_tokens - 1
    assert ranks.last_received is not None
    assert ranks.last_received.kv_bytes == NUM_RANKS * first.ticket.kv_bytes
    await ranks.prefill.until_idle()
    await ranks.decode.until_idle()


@pytest.mark.req("S57")
async def test_the_comparison_sees_zeroed_kv_and_a_lost_rank_ends_its_engine(
    ranks: Pair, plain_ranks: Plain, tiny_llama: Path
) -> None:
    broken = replace(config(tiny_llama, "decode-1", 3), failpoints="decode.pulled=zero-kv")
    todo = [i for i, case in enumerate(rank_cases()) if len(case.prompt) > 30][:8]
    async with running(broken) as decode:
        got = await generate_all(
            Pair(ranks.prefill, decode).generate, [rank_cases()[i] for i in todo], 4
        )
        assert len(differences([plain_ranks.tokens()[i] for i in todo], got)) > len(todo) // 2
        pids = decode.engine.worker_pids
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(EngineFailed):
            await asyncio.wait_for(decode.ended, 10)
        await until(lambda: not is_alive(pids[0]), 30)


HOST = """
import asyncio, sys
from pathlib import Path
from tests.e2e.pair import running
from tests.e2e.mesh.test_ranks import config

async def main():
    async with running(config(Path(sys.argv[1]), "prefill-9", 9)) as host:
        Path(sys.argv[2]).write_text(" ".join(map(str, host.engine.worker_pids)))
        await asyncio.Event().wait()

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.fault("F37")
@pytest.mark.req("S57")
def test_no_rank_outlives_a_killed_host(tiny_llama: Path, tmp_path: Path) -> None:
    told = tmp_path / "pids"
    command = [sys.executable, "-c", HOST, str(tiny_llama), str(told)]
    with subprocess.Popen(command, cwd=Path(__file__).parents[3]) as host:
        try:
            wait_until(lambda: host.poll() is not None or (told.exists() and told.read_text()), 240)
            assert host.poll() is None
            family = set(descendants(host.pid))
        finally:
            host.kill()
    pids = {int(pid) for pid in told.read_text().split()}
    assert len(pids) == NUM_RANKS
    assert pids < family, "the engine's process is between the host and its ranks"
    wait_until(lambda: not any(is_alive(pid) for pid in family), 20)


def descendants(pid: int) -> list[int]:
    """The child processes of all threads of a process, and all their descendants."""
    found: list[int] = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, children.read_text().split()):
            found += [child, *descendants(child)]
    return found
