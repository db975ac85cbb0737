"""Runs one measurement: generator processes send load, and the CPU of all processes is measured."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from loadtests.harness.client import LoadResult, LoadSpec
from loadtests.harness.processes import (
    Cost,
    ProcessSet,
    cpu_between,
    machine_busy_s,
)

ROOT: Final = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Measured:
    """The load of one window, and the CPU that it took.

    `cpu_s` has the CPU seconds of each measured process, and of the generators as `generator`.
    `others_cpu_s` is the CPU of all other processes on the machine.
    """

    load: LoadResult
    cpu_s: Mapping[str, float]
    others_cpu_s: float

    @property
    def total_cpu_s(self) -> float:
        return sum(self.cpu_s.values())

    @property
    def mesh_cpu_s(self) -> float:
        return self.total_cpu_s - self.cpu_s["generator"]


def measure(spec: LoadSpec, watched: ProcessSet, num_generators: int = 1) -> Measured:
    """Run `spec` with its connections divided among `num_generators` processes.

    Raises RuntimeError if a process fails.
    """
    count = min(num_generators, spec.concurrency)
    shares = [spec.concurrency // count + (i < spec.concurrency % count) for i in range(count)]
    running = [_start(replace(spec, concurrency=share)) for share in shares]
    generators = ProcessSet({f"generator-{i}": p.pid for i, p in enumerate(running)})
    try:
        _expect(running, "open")
        before, before_own, busy = watched.costs(), generators.costs(), machine_busy_s()
        _expect(running, "close")
        after, after_own, busy = watched.costs(), generators.costs(), machine_busy_s() - busy
        load = LoadResult()
        for process in running:
            assert process.stdout is not None
            load.merge(LoadResult.from_json(process.stdout.readline()))
    finally:
        for process in running:
            process.kill()
            process.communicate()
    cpu_s = _cpu(before, after, before_own, after_own)
    return Measured(load, cpu_s, max(0.0, busy - sum(cpu_s.values())))


def _cpu(
    before: Mapping[str, Cost],
    after: Mapping[str, Cost],
    before_own: Mapping[str, Cost],
    after_own: Mapping[str, Cost],
) -> dict[str, float]:
    own = sum(cpu_between(before_own, after_own).values())
    return {**cpu_between(before, after), "generator": own}


def _start(spec: LoadSpec) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "loadtests.harness.client"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert process.stdin is not None
    process.stdin.write(spec.to_json())
    process.stdin.close()
    process.stdin = None  # otherwise communicate() would flush the closed stdin
    return process


def _expect(processes: list[subprocess.Popen[str]], word: str) -> None:
    for process in processes:
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        if line != word:
            raise RuntimeError(f"a load generator said {line!r} instead of {word!r}")


@contextmanager
def beside(spec: LoadSpec) -> Iterator[list[LoadResult]]:
    """Send load during a `with` block, which begins after the warm-up.

    The result is in the list when the block has ended. `spec.duration_s` must be longer than the
    block. Raises RuntimeError if the generator fails.
    """
    process, found = _start(spec), list[LoadResult]()
    try:
        _expect([process], "open")
        yield found
        process.terminate()
        _expect([process], "close")
        assert process.stdout is not None
        found.append(LoadResult.from_json(process.stdout.readline()))
    finally:
        process.kill()
        process.communicate()


@contextmanager
def canned_server(pause_s: float = 0.0) -> Iterator[int]:
    """The server of canned answers in its own process; yields its port.

    The server pauses for `pause_s` between two events of a stream.
    """
    with _serving("loadtests.harness.canned", str(pause_s)) as port:
        yield port


@contextmanager
def passthrough(upstream: int) -> Iterator[int]:
    """The simplest gateway in its own process, in front of the server at port `upstream`.

    Yields the gateway's port.
    """
    with _serving("loadtests.harness.passthrough", str(upstream)) as port:
        yield port


@contextmanager
def _serving(module: str, *arguments: str) -> Iterator[int]:
    """Run a module that prints its port and then serves until its stdin is closed."""
    process = subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    try:
        assert process.stdout is not None
        yield int(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()
