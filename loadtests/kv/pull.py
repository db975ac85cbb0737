"""What one pull costs: latency, CPU on both sides and pulls per second, between two processes over
UCX.

    python -m loadtests.kv.pull            # 4 KiB to 64 MiB, one and 32 at a time
    python -m loadtests.kv.pull together   # 2 and 4 of 16 MiB, at once and in turn (S52)

The sender stages the same bytes once per pull, each time under a new ticket. So its CPU includes
the checksum of staging, but not gather and scatter. A single memcpy of the same size in the same
minute shows how fast the machine is.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import numpy as np

from loadtests.kv_bench.pair import TRANSPORTS
from pdmesh.core.instance.arena import ArenaRange
from pdmesh.core.kv.layout.buffer_layout import KvLayout
from pdmesh.core.kv.transfer.ticket import Ticket
from pdmesh.kv.agent.agent import KvAgent
from pdmesh.kv.agent.arena_memory import host_memory
from pdmesh.kv.agent.types import AgentIdentity
from pdmesh.kv.transport.ucx import UcxTransport

FINGERPRINT = "bench"
NUM_LAYERS = 4
_TOGETHER = (2, 4)  # how many pulls
_TOGETHER_BYTES = 16 << 20
_TOGETHER_ROUNDS = 20
CASES = ((4 << 10, 2000), (64 << 10, 1000), (1 << 20, 300), (16 << 20, 40), (64 << 20, 12))


def layout_of(size: int) -> KvLayout:
    return KvLayout(NUM_LAYERS, 1, size // NUM_LAYERS, FINGERPRINT)


async def sender() -> None:
    """For each line `size first count` on stdin, stage `count` tickets and print the CPU seconds of
    this process so far.
    """
    largest = max(size for size, _ in CASES)
    agent = KvAgent(
        UcxTransport(),
        AgentIdentity("prefill-0", 1, FINGERPRINT),
        host_memory(largest, 0),
        on_event=lambda _: None,
    )
    print(await agent.start(), flush=True)
    agent.staging(ArenaRange(0, largest))[:] = 1
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(lines), sys.stdin
    )
    while line := (await lines.readline()).split():
        size, first, count = map(int, line)
        for i in range(first, first + count):
            agent.stage(f"t{i}", 1, ArenaRange(0, size), layout_of(size), 60.0)
        print(time.process_time(), flush=True)
    await agent.close()


@dataclass(frozen=True, slots=True)
class Pulls:
    """The time that each pull took, and when it ended after the common start."""

    took_s: list[float]
    ends_s: list[float]


@dataclass
class Bench:
    agent: KvAgent
    child: subprocess.Popen[str]
    address: str
    num_staged: int = 0

    async def stage(self, size: int, count: int) -> float:
        assert self.child.stdin is not None
        assert self.child.stdout is not None
        self.child.stdin.write(f"{size} {self.num_staged} {count}\n")
        self.child.stdin.flush()
        self.num_staged += count
        return float(await asyncio.to_thread(self.child.stdout.readline))

    async def run(self, size: int, count: int, width: int) -> Pulls:
        first = self.num_staged - count
        todo = iter(range(first, first + count))
        pulls = Pulls([], [])

        async def worker(slot: int) -> None:
            for i in todo:
                ticket = Ticket(
                    f"t{i}", "r", 1, "prefill-0", 1, FINGERPRINT, 1, size, (self.address,), 60_000
                )
                result = await self.agent.pull(ticket, ArenaRange(slot * size, size), deadline_s=30)
                pulls.took_s.append(result.duration_s)
                pulls.ends_s.append(time.perf_counter() - started)

        started = time.perf_counter()
        await asyncio.gather(*(worker(slot) for slot in range(width)))
        return pulls


def memcpy_ms(size: int) -> float:
    source, target = np.ones(size, np.uint8), np.ones(size, np.uint8)
    best = float("inf")
    for _ in range(5):
        started = time.perf_counter()
        np.copyto(target, source)
        best = min(best, time.perf_counter() - started)
    return best * 1e3


@asynccontextmanager
async def running() -> AsyncIterator[Bench]:
    child = subprocess.Popen(
        [sys.executable, "-m", "loadtests.kv.pull", "sender"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    agent = KvAgent(
        UcxTransport(),
        AgentIdentity("decode-0", 2, FINGERPRINT),
        host_memory(0, 256 << 20),
        on_event=lambda _: None,
    )
    try:
        await agent.start()
        yield Bench(agent, child, child.stdout.readline().strip())
    finally:
        await agent.close()
        child.kill()
        child.wait()


async def main() -> None:
    async with running() as bench:
        print(
            "| bytes | at once | p50 | p99 | pulls/s | GB/s | CPU/pull here | CPU/pull there | "
            "memcpy |"
        )
        print("|---|---|---|---|---|---|---|---|---|")
        for size, count in CASES:
            for width in (1, min(32, (256 << 20) // size)):
                await show(bench, size, count, width)


async def together(transport: str) -> None:
    """Compare all pulls at once with one pull after the other, by the mean time until a pull is
    done.
    """
    size = _TOGETHER_BYTES
    ways = [(count, width) for count in _TOGETHER for width in (1, count)]
    ends_ms: dict[tuple[int, int], list[list[float]]] = {way: [] for way in ways}
    async with running() as bench:
        for number in range(_TOGETHER_ROUNDS + 1):
            for count, width in ways if number % 2 else reversed(ways):
                await bench.stage(size, count)
                pulls = await bench.run(size, count, width)
                if number:  # the first round warms up pages and the connection
                    ends_ms[count, width].append([end * 1e3 for end in pulls.ends_s])
    for count, width in ways:
        means = [statistics.fmean(ends) for ends in ends_ms[count, width]]
        lasts = [max(ends) for ends in ends_ms[count, width]]
        serial = [statistics.fmean(ends) for ends in ends_ms[count, 1]]
        ratios = [mean / one for mean, one in zip(means, serial, strict=True)]
        print(
            f"| {transport} | {count} | {'all at once' if width > 1 else 'one by one'} | "
            f"{_median(means, 2)} "
            f"| {_median(lasts, 2)} | {_median(ratios, 2)} |",
            flush=True,
        )


def _median(values: Sequence[float], digits: int) -> str:
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.{digits}f} [{low:.{digits}f}-{high:.{digits}f}]"


def compare_together() -> None:
    """Run a child process for each transport, since UCX reads its settings only once."""
    print(
        f"{_TOGETHER_BYTES >> 20} MiB each, {_TOGETHER_ROUNDS} rounds, median [lowest-highest] in "
        "ms"
    )
    print("| transport | pulls | how | mean time until done | last | mean / mean one by one |")
    print("|---|---|---|---|---|---|", flush=True)
    for transport, settings in TRANSPORTS.items():
        subprocess.run(
            [sys.executable, "-m", "loadtests.kv.pull", "together", transport],
            env=dict(settings) | os.environ,
            check=True,
        )


async def show(bench: Bench, size: int, count: int, width: int) -> None:
    await bench.stage(size, width)
    await bench.run(size, width, width)  # warm-up of pages and connection
    before = await bench.stage(size, count)
    here = time.process_time()
    pulls = await bench.run(size, count, width)
    wall = max(pulls.ends_s)
    here = (time.process_time() - here) / count
    there = (await bench.stage(size, 0) - before) / count
    p50, p99 = np.percentile(pulls.took_s, [50, 99]) * 1e3
    print(
        f"| {size >> 10} KiB | {width} | {p50:.2f} ms | {p99:.2f} ms | {count / wall:.0f} "
        f"| {size * count / wall / 1e9:.2f} | {here * 1e6:.0f} us | {there * 1e6:.0f} us "
        f"| {memcpy_ms(size):.3f} ms |",
        flush=True,
    )


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["sender"]:
            asyncio.run(sender())
        case ["together"]:
            compare_together()
        case ["together", name]:
            asyncio.run(together(name))
        case _:
            asyncio.run(main())
