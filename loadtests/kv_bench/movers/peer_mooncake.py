"""Runs Mooncake's transfer engine over tcp, in an interpreter of its own.

    PYTHON peer_mooncake.py LARGEST BLOCK_BYTES      # starts its source as a second process

Each line `kind bytes serial` on stdin is one read by the target. The program answers each line with
milliseconds. With kind `contiguous`, it reads one buffer. With `blocks`, it reads a batch with one
read per block, in random order.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Any

import numpy as np
from mooncake.engine import TransferEngine  # type: ignore[import-not-found]  # not in our .venv


def make(largest: int, value: int) -> tuple[Any, Any, str]:
    engine = TransferEngine()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    memory = np.full(largest, value, np.uint8)
    assert engine.register_memory(memory.ctypes.data, largest) == 0
    return engine, memory, f"127.0.0.1:{engine.get_rpc_port()}"


def source(answer: Any, largest: int) -> None:
    _engine, memory, name = make(largest, 7)
    print(json.dumps([name, int(memory.ctypes.data)]), file=answer, flush=True)
    sys.stdin.read()


def target(answer: Any, largest: int, block: int) -> None:
    other = subprocess.Popen(
        [sys.executable, __file__, str(largest), str(block), "source"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert other.stdout is not None
    name, address = json.loads(other.stdout.readline())
    engine, memory, _ = make(largest, 0)
    print("ready", file=answer, flush=True)
    for line in sys.stdin:
        kind, size = line.split()[0], int(line.split()[1])
        count = 1 if kind == "contiguous" else size // block
        piece = size // count
        orders = [np.random.default_rng(seed).permutation(count) for seed in (1, 2)]
        here = [int(memory.ctypes.data) + int(i) * piece for i in orders[0]]
        there = [address + int(i) * piece for i in orders[1]]
        lengths = [piece] * count
        memory[:size] = 0
        started = time.monotonic()
        if count == 1:
            status = engine.transfer_sync_read(name, here[0], there[0], size)
        else:
            status = engine.batch_transfer_sync_read(name, here, there, lengths)
        took = time.monotonic() - started
        is_ok = status == 0 and memory[0] == 7 and memory[size - 1] == 7
        print(took * 1e3 if is_ok else "failed", file=answer, flush=True)
    other.kill()
    os._exit(0)


if __name__ == "__main__":
    # The library logs to stdout. So answers are written to a copy of stdout, and the library's
    # lines are sent to stderr.
    stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if sys.argv[3:] == ["source"]:
        source(stdout, int(sys.argv[1]))
    else:
        target(stdout, int(sys.argv[1]), int(sys.argv[2]))
