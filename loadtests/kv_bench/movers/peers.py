"""Starts other transfer libraries, each in its own processes.

A library runs in an interpreter in which it is installed, or in our interpreter with a folder that
has the library.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from loadtests.kv_bench import cases
from loadtests.kv_bench.pair import TRANSPORTS
from pdmesh.kv.transport.ucx_worker import load_library

KINDS_OF: Final[Mapping[str, tuple[str, ...]]] = {
    "nixl": ("contiguous", "blocks", "told", "checked"),
    "mooncake": ("contiguous", "blocks"),
}
# The transports of each library. Mooncake has its own tcp, and no transport for shared memory.
TRANSPORTS_OF: Final[Mapping[str, tuple[str, ...]]] = {"nixl": ("tcp", "shm"), "mooncake": ("tcp",)}
_POLLING: Final = ("nixl",)


def interpreter_of(where: Path) -> tuple[str, dict[str, str]]:
    """The interpreter that runs a peer's script, and its environment.

    The interpreter is `where` itself, or ours if `where` is a folder of packages.
    """
    if not where.is_dir():
        return str(where), {}
    where = where.resolve()
    libraries = where / "nvidia" / "cu13" / "lib"  # nixl needs this library
    return sys.executable, {"PYTHONPATH": str(where), "LD_LIBRARY_PATH": str(libraries)}


class Peer:
    """The two processes of one library over one transport.

    `is_there` is False if they did not start. nixl's progress threads poll all the time and would
    take a core. So nixl's processes are paused while others are measured.
    """

    def __init__(self, name: str, where: Path, transport: str, largest: int) -> None:
        self._is_polling = name in _POLLING
        load_library()  # nixl uses UCX as well, and should have our settings
        program, its_own = interpreter_of(where)
        environment = dict(TRANSPORTS[transport]) | os.environ | {"UCX_LOG_LEVEL": "error"}
        environment |= its_own
        script = Path(__file__).with_name(f"peer_{name}.py")
        self._process = subprocess.Popen(
            [program, str(script), str(largest), str(cases.BLOCK_BYTES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self.is_there = self._process.stdout.readline().strip() == "ready"
        self._pause(True)

    def run_ms(self, kind: str, num_bytes: int) -> float | None:
        """The milliseconds of a transfer; None if it failed."""
        if not self.is_there:
            return None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._pause(False)
        self._process.stdin.write(f"{kind} {num_bytes}\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline().strip()
        self._pause(True)
        self.is_there = bool(answer)
        return float(answer) if answer and answer != "failed" else None

    def close(self) -> None:
        """End both processes. The sending process is in the other's process group."""
        self._signal(signal.SIGKILL)
        with self._process:  # the end of the block closes the pipes and waits for the process
            pass

    def _pause(self, is_paused: bool) -> None:
        if self._is_polling:
            self._signal(signal.SIGSTOP if is_paused else signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)
