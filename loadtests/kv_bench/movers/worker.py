"""One of the two processes. It carries out each line of stdin, and answers with a line on
stdout.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import sys
import time
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np

from loadtests.kv_bench import cases
from loadtests.kv_bench.cases import Command, PagedCache
from loadtests.kv_bench.movers.baselines import RawPeer
from loadtests.kv_bench.movers.product import (
    BlockIds,
    Receiver,
    Sender,
    Times,
)
from pdmesh.core.instance.arena import ArenaRange
from pdmesh.kv.agent.arena_memory import HostArena

_answers = sys.stdout
_RAW_MODES = (cases.BLOCKS_ACKED, cases.BLOCKS_PIPELINED, cases.WIRE, cases.WIRE_EMPTY)


class SendingWorker:
    def __init__(self, largest: int, pipe: int) -> None:
        self.cache_of = functools.cache(functools.partial(PagedCache, largest, 1))
        self.empty = HostArena(
            largest
        )  # never written, so it is the kernel's zero page, which ucx_perftest also sends
        self.product = Sender(largest, functools.partial(os.write, pipe, b"t"))
        self.raw = RawPeer()
        self.loop = asyncio.new_event_loop()

    def start(self) -> list[str]:
        return [self.product.agent.start(), self.loop.run_until_complete(self.raw.start())]

    def meet(self, addresses: list[str]) -> None:
        """Run the loop until the receiver is connected.

        The agent's welcome is sent only while the loop runs. The next line of stdin says that the
        receiver is connected.
        """
        self.loop.run_until_complete(asyncio.to_thread(sys.stdin.readline))
        assert self.raw.is_connected

    def run(self, command: Command) -> tuple[Times, str]:
        cache = self.cache_of(command.paging)
        ids = cache.take(command.num_bytes)
        digest = cache.digest(ids) if command.is_verified else ""
        if command.mode not in _RAW_MODES:
            return self.product.run(command, cache, ids), digest
        whole = ArenaRange(0, command.num_bytes)
        buffer, empty = self.product.agent.staging(whole), self.empty.view(whole)
        send: dict[str, Callable[[], Coroutine[Any, Any, float]]] = {
            cases.BLOCKS_ACKED: lambda: self.raw.send_acked(cache.blocks(ids)),
            cases.BLOCKS_PIPELINED: lambda: self.raw.send_window(cache.blocks(ids)),
            cases.WIRE: lambda: self.raw.send_same(buffer, command.repeats),
            cases.WIRE_EMPTY: lambda: self.raw.send_same(empty, command.repeats),
        }
        started = self.loop.run_until_complete(send[command.mode]())
        return Times(started=started, computed=started), digest


class ReceivingWorker:
    def __init__(self, largest: int, pipe: int) -> None:
        self.cache_of = functools.cache(functools.partial(PagedCache, largest, 2))
        self.product = Receiver(largest, functools.partial(os.read, pipe, 1))
        self.raw = RawPeer()
        self.loop = asyncio.new_event_loop()
        self.address = ""

    def start(self) -> list[str]:
        self.loop.run_until_complete(self.raw.start())
        return [self.product.agent.start()]

    def meet(self, addresses: list[str]) -> None:
        self.address = addresses[0]
        self.loop.run_until_complete(self.raw.connect(addresses[1]))

    def run(self, command: Command) -> tuple[Times, str]:
        cache = self.cache_of(command.paging)
        ids = cache.take(command.num_bytes)
        if command.is_verified:
            cache.wipe(ids)
        if command.mode not in _RAW_MODES:
            times = self.product.run(command, cache, ids, self.address)
        else:
            times = Times(ended=self._receive(command, cache, ids))
            if command.mode == cases.BLOCKS_ACKED:
                times.blocks_s = np.diff(self.raw.arrivals).tolist()
        return times, cache.digest(ids) if command.is_verified else ""

    def _receive(self, command: Command, cache: PagedCache, ids: BlockIds) -> float:
        buffer = self.product.agent.landing(ArenaRange(0, command.num_bytes))
        recv: dict[str, Callable[[], Coroutine[Any, Any, float]]] = {
            cases.BLOCKS_ACKED: lambda: self.raw.recv_acked(cache.blocks(ids)),
            cases.BLOCKS_PIPELINED: lambda: self.raw.recv_window(cache.blocks(ids)),
            cases.WIRE: lambda: self.raw.recv_same(buffer, command.repeats),
            cases.WIRE_EMPTY: lambda: self.raw.recv_same(buffer, command.repeats),
        }
        return self.loop.run_until_complete(recv[command.mode]())


def main() -> None:
    # UCX logs to stdout, so answers are written to a copy of it.
    global _answers
    _answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    role, largest, pipe = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    worker = (SendingWorker if role == "sender" else ReceivingWorker)(largest, pipe)
    _answer({"addresses": worker.start()})
    worker.meet(json.loads(sys.stdin.readline())["addresses"])
    _answer({})
    for line in sys.stdin:
        command = Command.from_json(json.loads(line))
        cpu = time.process_time()
        times, digest = worker.run(command)
        cpu = time.process_time() - cpu
        _answer(
            {
                "started": times.started,
                "computed": times.computed,
                "ended": times.ended,
                "gather_s": times.gather_s,
                "wire_s": times.wire_s,
                "scatter_s": times.scatter_s,
                "blocks_s": times.blocks_s,
                "cpu_s": cpu,
                "digest": digest,
            }
        )
    worker.product.agent.close()
    worker.loop.run_until_complete(worker.raw.transport.close())


def _answer(what: dict[str, object]) -> None:
    print(json.dumps(what), file=_answers, flush=True)


if __name__ == "__main__":
    main()
