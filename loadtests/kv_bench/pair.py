"""Two worker processes over one UCX transport, and the times of the commands that both carry
out.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from loadtests.kv_bench import cases
from loadtests.kv_bench.cases import DEFAULT_PAGING, Command, Paging

TRANSPORTS: Final[Mapping[str, Mapping[str, str]]] = {
    "tcp": {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"},
    "shm": {"UCX_TLS": "tcp,sm", "UCX_NET_DEVICES": "lo"},
}


@dataclass(frozen=True, slots=True)
class Sample:
    """The times of one transfer, or the mean of a command's repeats.

    `visible_ms` begins at the end of the computation.
    """

    total_ms: float
    visible_ms: float
    gather_ms: float
    wire_ms: float
    scatter_ms: float
    cpu_sender_ms: float
    cpu_receiver_ms: float
    # The time of one block if each waits for the ack of the block before: median, 99th percentile,
    # standard deviation.
    block_ms: float | None = None
    block_p99_ms: float | None = None
    block_deviation_ms: float | None = None


class Pair:
    def __init__(self, transport: str, largest: int) -> None:
        environment = dict(TRANSPORTS[transport]) | os.environ
        reader, writer = os.pipe()
        self._processes = [
            self._spawn("sender", largest, writer, environment),
            self._spawn("receiver", largest, reader, environment),
        ]
        os.close(reader)
        os.close(writer)
        addresses = self._hear(0)["addresses"]
        self._hear(1)
        self._say({"addresses": addresses})
        self._hear(1)  # its answer says that it is connected
        self._say({}, only=0)
        self._hear(0)
        self._num_commands = 0

    def run(
        self,
        mode: str,
        num_bytes: int,
        *,
        repeats: int = 1,
        chunk_bytes: int = 0,
        is_verified: bool = False,
        paging: Paging = DEFAULT_PAGING,
    ) -> Sample:
        """Let both processes carry out one transfer.

        Raises AssertionError if the bytes that arrived are not the bytes that were sent.
        """
        self._num_commands += 1
        command = Command(
            mode, num_bytes, self._num_commands, repeats, chunk_bytes, is_verified, paging
        )
        self._say(asdict(command))
        sent, received = self._hear(0), self._hear(1)
        assert sent["digest"] == received["digest"], f"{command}: other bytes arrived"
        total_ms = (received["ended"] - sent["started"]) * 1e3 / repeats
        blocks_ms = np.array(received["blocks_s"]) * 1e3
        is_alone = mode in (cases.WIRE, cases.WIRE_EMPTY)
        return Sample(
            total_ms=total_ms,
            visible_ms=(received["ended"] - sent["computed"]) * 1e3 / repeats,
            gather_ms=sent["gather_s"] * 1e3,
            wire_ms=total_ms if is_alone else received["wire_s"] * 1e3,
            scatter_ms=received["scatter_s"] * 1e3,
            cpu_sender_ms=sent["cpu_s"] * 1e3 / repeats,
            cpu_receiver_ms=received["cpu_s"] * 1e3 / repeats,
            block_ms=float(np.median(blocks_ms)) if blocks_ms.size else None,
            block_p99_ms=float(np.percentile(blocks_ms, 99)) if blocks_ms.size else None,
            block_deviation_ms=float(np.std(blocks_ms)) if blocks_ms.size else None,
        )

    def close(self) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    @staticmethod
    def _spawn(
        role: str, largest: int, pipe: int, environment: Mapping[str, str]
    ) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [
                sys.executable,
                "-m",
                "loadtests.kv_bench.movers.worker",
                role,
                str(largest),
                str(pipe),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            pass_fds=[pipe],
        )

    def _say(self, what: dict[str, Any], only: int | None = None) -> None:
        told = self._processes if only is None else [self._processes[only]]
        for process in reversed(told):  # end the receiver first
            assert process.stdin is not None
            process.stdin.write(json.dumps(what) + "\n")
            process.stdin.flush()

    def _hear(self, which: int) -> dict[str, Any]:
        process = self._processes[which]
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"a worker died with exit code {process.wait()}")
        return dict(json.loads(line))


@contextmanager
def pair(transport: str, largest: int) -> Iterator[Pair]:
    both = Pair(transport, largest)
    try:
        yield both
    finally:
        both.close()
