"""What the machine and UCX can do without our code: raw memcpy, and UCX's own `ucx_perftest`.

`ucx_perftest` comes with the libucx that we load. It has the same UCX_* settings and error
handling, and sends one message after the other. It runs twice: polling (its default), and sleeping
until there is work, as our agents do. It never writes the memory that it sends, so it sends the
kernel's page of zeros (1.4 MiB resident with a buffer of 256 MiB).
"""

from __future__ import annotations

import contextlib
import os
import socket
import statistics
import subprocess
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import numpy as np

from loadtests.kv_bench.pair import TRANSPORTS
from pdmesh.kv.transport.ucx_worker import load_library

_TRIES: Final = 40
_PAUSE_S: Final = 0.05
_LIMIT_S: Final = 60.0
WAITS: Final = ("poll", "sleep")


def memcpy_ms(num_bytes: int) -> float:
    """Milliseconds of a copy between warm arrays, as the median of three copies."""
    source, target = np.ones(num_bytes, np.uint8), np.ones(num_bytes, np.uint8)
    took = []
    for _ in range(3):
        started = time.perf_counter()
        np.copyto(target, source)
        took.append((time.perf_counter() - started) * 1e3)
    return statistics.median(took)


def perftest_binary() -> Path | None:
    """The ucx_perftest that comes with our libucx; None if there is none."""
    spec = find_spec("libucx")
    for folder in spec.submodule_search_locations or () if spec else ():
        binary = Path(folder, "bin", "ucx_perftest")
        if binary.exists():
            return binary
    return None


def perftest_ms(transport: str, num_bytes: int, repeats: int, wait: str) -> float | None:
    """Milliseconds per message of tag_bw; None if there is no ucx_perftest."""
    binary = perftest_binary()
    if binary is None:
        return None
    load_library()  # this puts our UCX_* settings into the environment
    environment = dict(TRANSPORTS[transport]) | os.environ
    environment |= {"LD_LIBRARY_PATH": str(binary.parent.parent / "lib")}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    settings = [str(binary), "-p", port, "-e", "-E", wait]
    server = subprocess.Popen(
        settings, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    test = ["-t", "tag_bw", "-s", str(num_bytes), "-n", str(repeats), "-w", "2", "-f", "-v"]
    try:
        for _ in range(_TRIES):  # until the server listens
            time.sleep(_PAUSE_S)
            done = _client([*settings[:3], "127.0.0.1", *settings[3:], *test], environment)
            if done is not None:
                return done
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(1)
        server.kill()
        server.wait()
    return None


def _client(command: list[str], environment: Mapping[str, str]) -> float | None:
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return None
    lines = done.stdout.strip().splitlines()
    if done.returncode or len(lines) < 2:
        return None
    values = dict(zip(lines[-2].split(","), lines[-1].split(","), strict=True))
    return float(values["overall_lat"]) / 1e3
