"""nixl in an interpreter of its own: each line `kind bytes serial` on standard input is one READ, as vLLM's NixlConnector reads.

    PYTHON peer_nixl.py LARGEST BLOCK_BYTES          # starts its source as a second process

Answers each line with milliseconds. `contiguous` is one descriptor, `blocks` one per block, both sides in random order and
prepared beforehand; making the request of a transfer is part of its time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Any

import numpy as np
from nixl._api import nixl_agent, nixl_agent_config  # type: ignore[import-not-found]  # not in our .venv


def make(role: str, largest: int) -> tuple[Any, Any]:
    agent = nixl_agent(role, nixl_agent_config(backends=["UCX"]))
    memory = np.full(largest, 7 if role == "source" else 0, np.uint8)
    agent.register_memory([(memory.ctypes.data, largest, 0, "")], "DRAM")
    return agent, memory


def descriptors(address: int, num_bytes: int, block: int, seed: int) -> Any:
    order = np.random.default_rng(seed).permutation(num_bytes // block)
    return [(address + int(i) * block, block, 0) for i in order]


def source(answer: Any, largest: int) -> None:
    agent, memory = make("source", largest)
    print(
        json.dumps([agent.get_agent_metadata().hex(), int(memory.ctypes.data)]),
        file=answer,
        flush=True,
    )
    sys.stdin.read()


def target(answer: Any, largest: int, block: int) -> None:
    other = subprocess.Popen(
        [sys.executable, __file__, str(largest), str(block), "source"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert other.stdout is not None
    metadata, address = json.loads(other.stdout.readline())
    agent, memory = make("target", largest)
    name = agent.add_remote_agent(bytes.fromhex(metadata))
    print("ready", file=answer, flush=True)
    for line in sys.stdin:
        kind, size = line.split()[0], int(line.split()[1])
        piece = size if kind == "contiguous" else block
        here = descriptors(int(memory.ctypes.data), size, piece, 1)
        there = descriptors(address, size, piece, 2)
        mine = agent.prep_xfer_dlist("NIXL_INIT_AGENT", here, "DRAM")
        theirs = agent.prep_xfer_dlist(name, there, "DRAM")
        index = np.arange(size // piece, dtype=np.int32)
        memory[:size] = 0
        started = time.monotonic()
        handle = agent.make_prepped_xfer("READ", mine, index, theirs, index)
        state = agent.transfer(handle)
        while state == "PROC":
            time.sleep(0)  # its progress thread needs a core too
            state = agent.check_xfer_state(handle)
        took = time.monotonic() - started
        is_ok = state == "DONE" and memory[0] == 7 and memory[size - 1] == 7
        agent.release_xfer_handle(handle)
        print(took * 1e3 if is_ok else "failed", file=answer, flush=True)
    other.kill()
    os._exit(0)


if __name__ == "__main__":
    # The library logs to standard output: answers go to a copy of it, its own words to standard error.
    stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if sys.argv[3:] == ["source"]:
        source(stdout, int(sys.argv[1]))
    else:
        target(stdout, int(sys.argv[1]), int(sys.argv[2]))
