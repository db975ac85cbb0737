"""Runs nixl in an interpreter of its own. The target reads KV as vLLM's NixlConnector does.

    PYTHON peer_nixl.py LARGEST BLOCK_BYTES          # starts its source as a second process

Each line `kind bytes` on stdin is one transfer. The program answers each line with milliseconds.
The caches are registered and all their blocks prepared beforehand. The time to make a transfer's
request counts. The kinds are:

- `contiguous`: one descriptor.
- `blocks`: random blocks of a cache, on both sides. The cache is 1.5 times the largest prompt, as
  in our own measurement. With this kind and with `contiguous`, the target knows by itself when it
  may read.
- `told`: the same blocks, but the source tells the target when it may read, with the library's own
  notification. The time begins when the source has the blocks.
- `checked`: like `told`, with the checksums of our product. The notification of each part of 4 MiB
  has the part's xxh3_128, and the target compares it. The target reads one part while it checks the
  part before.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash
from nixl._api import nixl_agent, nixl_agent_config  # type: ignore[import-not-found]  # not in our .venv

_PART_BYTES: Final = 4 << 20
BlockIds = npt.NDArray[np.int32]


class Cache:
    """The registered blocks of one side.

    Each block of the source is filled with its own number.
    """

    def __init__(self, role: str, largest: int, block: int) -> None:
        self.agent = nixl_agent(role, nixl_agent_config(backends=["UCX"]))
        self.num_blocks = largest // block * 3 // 2 + 1
        self.words = np.empty((self.num_blocks, block // 8), np.uint64)
        self.words[:] = np.arange(1, self.num_blocks + 1, dtype=np.uint64)[:, None]
        if role == "target":
            self.words[:] = 0  # written once, so that all pages exist before bytes arrive
        self.address = int(self.words.ctypes.data)
        self.views = [memoryview(row) for row in self.words]  # type: ignore[arg-type]  # numpy arrays are buffers
        self.agent.register_memory([(self.address, self.words.nbytes, 0, "")], "DRAM")

    def take(self, serial: int, seed: int, count: int) -> BlockIds:
        """The blocks of a prompt.

        The blocks follow from `serial` and `seed`. So both processes can compute the blocks of both
        sides.
        """
        order = np.random.default_rng((serial, seed)).permutation(self.num_blocks)
        return order[:count].astype(np.int32)

    def digest(self, ids: BlockIds) -> str:
        made = xxhash.xxh3_128()
        for i in ids:
            made.update(self.views[i])
        return made.hexdigest()


def parts(ids: BlockIds, block: int) -> Iterator[BlockIds]:
    step = _PART_BYTES // block
    return (ids[at : at + step] for at in range(0, len(ids), step))


def source(answer: Any, largest: int, block: int) -> None:
    cache = Cache("source", largest, block)
    print(
        json.dumps([cache.agent.get_agent_metadata().hex(), cache.address]),
        file=answer,
        flush=True,
    )
    target = cache.agent.add_remote_agent(bytes.fromhex(sys.stdin.readline()))
    for line in sys.stdin:
        kind, serial, count = line.split()
        ids = cache.take(int(serial), 2, int(count))
        started = time.monotonic()  # both processes read the same clock
        if kind == "told":
            cache.agent.send_notif(target, f"{started}".encode())
            continue
        for part in parts(ids, block):
            cache.agent.send_notif(target, f"{started} {cache.digest(part)}".encode())


class Target:
    def __init__(self, largest: int, block: int) -> None:
        self._source = subprocess.Popen(
            [sys.executable, __file__, str(largest), str(block), "source"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        metadata, self._address = json.loads(self._hear())
        self._block = block
        self._cache = Cache("target", largest, block)
        self._agent = self._cache.agent
        self._name = self._agent.add_remote_agent(bytes.fromhex(metadata))
        self._say(self._agent.get_agent_metadata().hex())
        self._told: deque[list[str]] = deque()  # notifications that have not been read
        self._mine = self._prepare("NIXL_INIT_AGENT", self._cache.address, block)
        self._theirs = self._prepare(self._name, self._address, block)
        self._num_done = 0

    def run_ms(self, kind: str, num_bytes: int) -> float | None:
        """The milliseconds of a transfer; None if it failed."""
        self._num_done += 1
        if kind == "contiguous":
            mine = self._prepare("NIXL_INIT_AGENT", self._cache.address, num_bytes, 1)
            theirs = self._prepare(self._name, self._address, num_bytes, 1)
            only = np.zeros(1, np.int32)
            started = time.monotonic()
            is_ok = self._finish(self._begin(mine, only, theirs, only))
            return (time.monotonic() - started) * 1e3 if is_ok else None
        count = num_bytes // self._block
        here = self._cache.take(self._num_done, 1, count)
        there = self._cache.take(self._num_done, 2, count)
        if kind in ("told", "checked"):
            self._say(f"{kind} {self._num_done} {count}")
            run = self._checked if kind == "checked" else self._read_when_told
            took, is_ok = run(here, there)
        else:
            started = time.monotonic()
            is_ok = self._finish(self._begin(self._mine, here, self._theirs, there))
            took = time.monotonic() - started
        is_ok = is_ok and bool((self._cache.words[here, -1] == there + 1).all())
        return took * 1e3 if is_ok else None

    def _read_when_told(self, here: BlockIds, there: BlockIds) -> tuple[float, bool]:
        (started,) = self._await_word()
        is_ok = self._finish(self._begin(self._mine, here, self._theirs, there))
        return time.monotonic() - float(started), is_ok

    def _checked(self, here: BlockIds, there: BlockIds) -> tuple[float, bool]:
        """Read each part while the part before is checked, as our product does."""
        started = ""
        before: tuple[Any, BlockIds, str] | None = None
        is_ok = True
        for mine, theirs in zip(parts(here, self._block), parts(there, self._block), strict=True):
            started, expected = self._await_word()
            handle = self._begin(self._mine, mine, self._theirs, theirs)
            is_ok = self._check(before) and is_ok
            before = handle, mine, expected
        is_ok = self._check(before) and is_ok
        return time.monotonic() - float(started), is_ok

    def _check(self, part: tuple[Any, BlockIds, str] | None) -> bool:
        if part is None:
            return True
        handle, ids, expected = part
        return self._finish(handle) and self._cache.digest(ids) == expected

    def _prepare(self, name: str, address: int, size: int, count: int = 0) -> Any:
        count = count or self._cache.num_blocks
        blocks = [(address + i * size, size, 0) for i in range(count)]
        return self._agent.prep_xfer_dlist(name, blocks, "DRAM")

    def _begin(self, mine: Any, here: BlockIds, theirs: Any, there: BlockIds) -> Any:
        handle = self._agent.make_prepped_xfer("READ", mine, here, theirs, there)
        return handle, self._agent.transfer(handle)

    def _finish(self, transfer: Any) -> bool:
        handle, state = transfer
        while state == "PROC":
            time.sleep(0)  # nixl's progress thread needs a core as well
            state = self._agent.check_xfer_state(handle)
        self._agent.release_xfer_handle(handle)
        return bool(state == "DONE")

    def _await_word(self) -> list[str]:
        while not self._told:
            time.sleep(0)
            for words in self._agent.get_new_notifs().values():
                self._told.extend(word.decode().split() for word in words)
        return self._told.popleft()

    def _say(self, what: str) -> None:
        assert self._source.stdin is not None
        self._source.stdin.write(what + "\n")
        self._source.stdin.flush()

    def _hear(self) -> str:
        assert self._source.stdout is not None
        return self._source.stdout.readline().strip()

    def close(self) -> None:
        self._source.kill()


def main(answer: Any, largest: int, block: int) -> None:
    target = Target(largest, block)
    print("ready", file=answer, flush=True)
    for line in sys.stdin:
        kind, size = line.split()
        took = target.run_ms(kind, int(size))
        print("failed" if took is None else took, file=answer, flush=True)
    target.close()
    os._exit(0)


if __name__ == "__main__":
    # The library logs to stdout. So answers are written to a copy of stdout, and the library's
    # lines are sent to stderr.
    stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    run = source if sys.argv[3:] == ["source"] else main
    run(stdout, int(sys.argv[1]), int(sys.argv[2]))
