"""Checks that each process's memory stays flat while many requests pass.

Plain and streamed answers alternate in slices. Resident memory is read between slices, when no
request runs. Allocators keep pages, so a process grows at first. So a line is fitted to the slices
after warm-up. A leak shows as the slope of this line.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Final

from loadtests.gateway.report import table
from loadtests.gateway.scenarios import Kind, Scenario
from loadtests.harness.generator import measure
from loadtests.harness.mesh import RunningMesh
from loadtests.harness.progress import Progress
from loadtests.harness.results import describe_machine, describe_versions

_NUM_SLICES: Final = 20
_WARMUP_SHARE: Final = 0.4
_SLICE_LIMIT_S: Final = 300.0
_CONCURRENCY: Final = 32
FLAT_BYTES_PER_REQUEST: Final = 64.0  # less than any object that a request could leak


@dataclass(slots=True)
class MemoryRun:
    """The resident bytes of each process after each slice, beside the number of requests so far."""

    mesh: str
    num_requests: list[int] = field(default_factory=list)
    rss_bytes: dict[str, list[int]] = field(default_factory=dict)
    num_errors: int = 0
    machine: str = field(default_factory=describe_machine)
    versions: dict[str, str] = field(default_factory=describe_versions)

    def sample(self, num_requests: int, rss_bytes: Mapping[str, int]) -> None:
        self.num_requests.append(num_requests)
        for name, size in rss_bytes.items():
            self.rss_bytes.setdefault(name, []).append(size)

    def slope(self, name: str) -> float:
        """Bytes per request after warm-up."""
        first = int(len(self.num_requests) * _WARMUP_SHARE)
        return least_squares_slope(self.num_requests[first:], self.rss_bytes[name][first:])

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)


def least_squares_slope(x: Sequence[float], y: Sequence[float]) -> float:
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    spread = sum((a - mean_x) ** 2 for a in x)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread


def measure_memory(mesh: RunningMesh, prompts: tuple[str, ...], num_requests: int) -> MemoryRun:
    run = MemoryRun(mesh.description)
    progress = Progress(_NUM_SLICES)
    done = 0
    run.sample(done, _rss(mesh))
    for number in range(_NUM_SLICES):
        progress.step(f"{done:,} of {num_requests:,} requests")
        kind = Kind.SHORT_STREAM if number % 2 else Kind.HANDOVER
        spec = Scenario(kind, _CONCURRENCY).spec(
            mesh.host,
            mesh.port,
            prompts,
            warmup_s=0.0,
            duration_s=_SLICE_LIMIT_S,
            max_requests=num_requests // _NUM_SLICES,
        )
        load = measure(spec, mesh.processes).load
        done += load.num_requests
        run.num_errors += sum(load.errors.values()) + load.num_stuck
        run.sample(done, _rss(mesh))
    progress.close()
    return run


def _rss(mesh: RunningMesh) -> dict[str, int]:
    return {name: cost.rss_bytes for name, cost in mesh.processes.costs().items()}


def memory_markdown(run: MemoryRun) -> str:
    first = int(len(run.num_requests) * _WARMUP_SHARE)
    rows = []
    for name, sizes in run.rss_bytes.items():
        slope = run.slope(name)
        rows.append(
            (
                name,
                *(f"{size / 2**20:.1f}" for size in (sizes[0], sizes[first], sizes[-1])),
                f"{slope:+.1f}",
                "yes" if slope <= FLAT_BYTES_PER_REQUEST else "**no**",
            )
        )
    about = (
        f"{run.num_requests[-1]:,} requests, plain and streamed in turns, {_CONCURRENCY} at a time,"
        f" {run.num_errors} errors. Mesh: {run.mesh}. Machine: {run.machine}. Slope fitted after"
        f" {run.num_requests[first]:,} requests; flat means at most"
        f" {FLAT_BYTES_PER_REQUEST:.0f} bytes per request."
    )
    head = (
        "process",
        "RSS MiB at start",
        "after warm-up",
        "at the end",
        "bytes per request",
        "flat",
    )
    return (
        "\n\n".join(
            (
                "# Memory of each process under load",
                about,
                table(head, rows),
            )
        )
        + "\n"
    )
