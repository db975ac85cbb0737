"""Moves KV over UCX from the cache of one process to the cache of another, both on a GPU.

The steps are those of a mesh: gather into the arena (registered memory), stage, pull, verify,
scatter. They run once with arenas in page-locked host memory, and once with arenas in the GPU's
memory. Plain copies of the same size to the host and back are measured for comparison.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from typing import Any, Final

import numpy as np
import torch

from loadtests.gpu_check.finding import Finding, Row
from pdmesh.core.instance.arena import ArenaRange
from pdmesh.core.kv.layout.buffer_layout import KvLayout
from pdmesh.core.kv.layout.head_blocks import head_blocks
from pdmesh.core.kv.transfer.gpu_or_host import KvMemory, NoSuchPath, decide_path
from pdmesh.core.kv.transfer.ticket import Ticket
from pdmesh.engine.vllm.connector.worker.device_caches import DeviceCaches
from pdmesh.kv.agent.agent import KvAgent
from pdmesh.kv.agent.arena_memory import AgentMemory, ArenaMemory, HostArena
from pdmesh.kv.agent.types import AgentIdentity
from pdmesh.kv.device.arena import DeviceArena
from pdmesh.kv.device.copies import lock_pages
from pdmesh.kv.device.probe import path_facts
from pdmesh.kv.transport.ucx import UcxTransport

MODEL: Final = "gpu-check"
NUM_LAYERS: Final = 32
SHAPE: Final = (2, 1024, 16, 8, 128)  # 64 KiB per block of 16 tokens, as in an 8B model
CASES: Final = (16, 64, 256, 512)  # prompt lengths in blocks
ROUNDS: Final = 7
MEMORIES: Final = (KvMemory.HOST, KvMemory.DEVICE)
_SEED: Final = {"sender": 1, "receiver": 2}


def caches_of(role: str) -> list[torch.Tensor]:
    """The caches of all layers for this role.

    The numbers come from a seed. So each process can make the caches of both roles.
    """
    generator = torch.Generator(device="cuda")
    generator.manual_seed(_SEED[role])
    return [
        torch.randint(
            -(1 << 15), 1 << 15, SHAPE, dtype=torch.int16, device="cuda", generator=generator
        )
        for _ in range(NUM_LAYERS)
    ]


def ids_of(num_blocks: int, role: str) -> list[int]:
    rng = np.random.default_rng(_SEED[role])
    return list(map(int, rng.permutation(SHAPE[1])[:num_blocks]))


def layout_of(num_blocks: int) -> KvLayout:
    shape = SHAPE[3] * SHAPE[2] * SHAPE[4] * 2 * 2
    return KvLayout(NUM_LAYERS, num_blocks, shape, MODEL, SHAPE[3])


def paged(caches: list[torch.Tensor]) -> DeviceCaches:
    return DeviceCaches(caches, head_blocks("kbnhc", SHAPE, caches[0].stride(), 2))


def arena_of(memory: KvMemory, num_bytes: int) -> ArenaMemory:
    if memory is KvMemory.DEVICE:
        return DeviceArena(num_bytes, "cuda")
    arena = HostArena(num_bytes)
    if num_bytes:
        lock_pages(arena.view(ArenaRange(0, num_bytes)))
    return arena


def transport_of(memory: KvMemory) -> UcxTransport:
    return UcxTransport(reaches_gpu=memory is KvMemory.DEVICE)


async def send(kind: KvMemory) -> None:
    """For each line `blocks ticket` on stdin, gather and stage the blocks, and print the
    seconds.
    """
    num_bytes = layout_of(max(CASES)).total_bytes
    memory = AgentMemory(arena_of(kind, num_bytes), HostArena(0))
    caches = paged(caches_of("sender"))
    agent = KvAgent(
        transport_of(kind), AgentIdentity("prefill-0", 1, MODEL), memory, on_event=lambda _: None
    )
    print(json.dumps({"address": await agent.start()}), flush=True)
    while line := (await asyncio.to_thread(sys.stdin.readline)).split():
        layout = layout_of(int(line[0]))
        r = ArenaRange(0, layout.total_bytes)
        began = time.perf_counter()
        ended = threading.Event()
        caches.gather(ids_of(layout.num_blocks, "sender"), agent.staging(r), ended.set)
        await asyncio.to_thread(ended.wait)
        gather_s = time.perf_counter() - began
        agent.stage(line[1], 1, r, layout, 60.0)
        print(json.dumps({"gather_s": gather_s}), flush=True)
    await agent.close()


async def check(kind: KvMemory) -> Finding:
    facts = path_facts(torch.device("cuda", 0), "127.0.0.1", 0)
    title = f"KV over UCX from cache to cache, arenas in {kind.value} memory"
    try:
        decide_path(kind, facts, requires_rdma=False)
    except NoSuchPath as error:
        return Finding(title, f"{error}.", None)
    child = subprocess.Popen(
        [sys.executable, "-m", "loadtests.gpu_check.transfer", kind.value],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    memory = AgentMemory(HostArena(0), arena_of(kind, layout_of(max(CASES)).total_bytes))
    agent = KvAgent(
        transport_of(kind), AgentIdentity("decode-0", 2, MODEL), memory, on_event=lambda _: None
    )
    try:
        await agent.start()
        receiver = _Receiver(agent, child)
        await receiver.hear()
        rows = [await receiver.case(num_blocks) for num_blocks in CASES]
    finally:
        await agent.close()
        child.kill()
        child.wait()
    wrong = [row for row in rows if row["equal"] != "yes"]
    claim = (
        "Two processes, each with the cache of an 8B model's layers. Gather, pull (verified), "
        f"scatter; every block compared on the device. Best of {ROUNDS}. The plain copies are the "
        "same bytes from and to locked memory."
    )
    return Finding(title, claim, not wrong, rows)


class _Receiver:
    def __init__(self, agent: KvAgent, child: subprocess.Popen[str]) -> None:
        self._agent, self._child = agent, child
        self._source, self._target = caches_of("sender"), caches_of("receiver")
        self._caches = paged(self._target)
        self._num_tickets = 0
        self._address = ""

    async def hear(self) -> dict[str, Any]:
        assert self._child.stdout is not None
        line = await asyncio.to_thread(self._child.stdout.readline)
        if not line:
            raise RuntimeError("the sender ended")
        said: dict[str, Any] = json.loads(line)
        self._address = said.get("address", self._address)
        return said

    async def case(self, num_blocks: int) -> Row:
        layout = layout_of(num_blocks)
        rounds = [await self._round(layout) for _ in range(ROUNDS)]
        gather_s, pull_s, scatter_s = min(rounds, key=sum)
        total_s = gather_s + pull_s + scatter_s
        plain_s = self._plain_copies_s(layout.total_bytes)
        return {
            "blocks": num_blocks,
            "MiB": layout.total_bytes >> 20,
            "gather, ms": f"{1e3 * gather_s:.2f}",
            "pull, ms": f"{1e3 * pull_s:.2f}",
            "scatter, ms": f"{1e3 * scatter_s:.2f}",
            "GB/s in all": f"{layout.total_bytes / total_s / 1e9:.2f}",
            "plain copies out and in, ms": f"{1e3 * plain_s:.2f}",
            "equal": "yes" if self._is_equal(num_blocks) else "NO",
        }

    async def _round(self, layout: KvLayout) -> tuple[float, float, float]:
        for cache in self._target:
            cache.zero_()
        torch.cuda.synchronize()
        self._num_tickets += 1
        ticket_id = f"t{self._num_tickets}"
        assert self._child.stdin is not None
        self._child.stdin.write(f"{layout.num_blocks} {ticket_id}\n")
        self._child.stdin.flush()
        gather_s = (await self.hear())["gather_s"]
        ticket = Ticket(
            ticket_id, "r", 1, "prefill-0", 1, MODEL, layout.num_blocks * 16, layout.total_bytes,
            (self._address,), 60_000,
        )  # fmt: skip
        landing = ArenaRange(0, layout.total_bytes)
        began = time.perf_counter()
        await self._agent.pull(ticket, landing, deadline_s=60)
        pulled = time.perf_counter()
        ended = threading.Event()
        ids = ids_of(layout.num_blocks, "receiver")
        self._caches.scatter(self._agent.landing(landing), ids, ended.set)
        await asyncio.to_thread(ended.wait)
        return gather_s, pulled - began, time.perf_counter() - pulled

    def _is_equal(self, num_blocks: int) -> bool:
        source, target = ids_of(num_blocks, "sender"), ids_of(num_blocks, "receiver")
        return all(
            torch.equal(mine[:, target], theirs[:, source])
            for mine, theirs in zip(self._target, self._source, strict=True)
        )

    def _plain_copies_s(self, num_bytes: int) -> float:
        host = torch.empty(num_bytes, dtype=torch.uint8).pin_memory()
        device = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
        times = []
        for _ in range(ROUNDS):
            torch.cuda.synchronize()
            began = time.perf_counter()
            host.copy_(device, non_blocking=True)
            device.copy_(host, non_blocking=True)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
        return min(times)


if __name__ == "__main__":
    asyncio.run(send(KvMemory(sys.argv[1])))
