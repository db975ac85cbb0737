"""Writes the results of measurements as JSON and Markdown.

Every report has the machine, the versions, and medians with their spread. The classes for the
rounds of `loadtests.gateway.overhead` are here as well.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Final, TypeVar

import psutil

from loadtests.harness.generator import ROOT, Measured

T = TypeVar("T")

STALL_S: Final = (0.035, 0.060)  # a delayed ACK takes a little more than 40 ms
# When this program began. The load average is read before the program itself is busy.
_BEGAN: Final = datetime.now(UTC).isoformat(timespec="minutes")
_LOAD_BEFORE: Final = os.getloadavg()[0]
_PACKAGES: Final = ("grpcio", "protobuf", "uvicorn", "uvloop", "tokenizers", "ucxx-cu13", "nats-py")


@dataclass(frozen=True, slots=True)
class Cell:
    """One scenario in one round. Times are in milliseconds."""

    scenario: str
    requests_per_s: float
    tokens_per_s: float
    ttft_ms: tuple[float, float, float]  # p50, p90, p99
    latency_ms: tuple[float, float, float]
    stall_share: float  # share of TTFTs and of gaps between reads that took 35 to 60 ms
    longest_gap_ms: float
    mesh_cpu_s_per_1k_requests: float
    mesh_cpu_s_per_1m_tokens: float
    cpu_s: Mapping[str, float]
    others_cores: float  # CPU that other processes used, in cores; this is noise
    num_events: int
    window_s: float
    num_requests: int
    num_stuck: int
    errors: Mapping[str, int]

    @classmethod
    def of(cls, scenario: str, measured: Measured) -> Cell:
        load = measured.load
        quantiles = [
            tuple(round(h.quantile(q) * 1e3, 3) for q in (0.5, 0.9, 0.99))
            for h in (load.ttft, load.latency)
        ]
        seen = load.ttft.count + load.gaps.count
        stalls = sum(h.share_between(*STALL_S) * h.count for h in (load.ttft, load.gaps))
        return cls(
            scenario=scenario,
            requests_per_s=load.requests_per_s,
            tokens_per_s=load.tokens_per_s,
            ttft_ms=(quantiles[0][0], quantiles[0][1], quantiles[0][2]),
            latency_ms=(quantiles[1][0], quantiles[1][1], quantiles[1][2]),
            stall_share=stalls / seen if seen else 0.0,
            longest_gap_ms=load.gaps.longest_s * 1e3,
            mesh_cpu_s_per_1k_requests=_per(measured.mesh_cpu_s, load.num_requests, 1e3),
            mesh_cpu_s_per_1m_tokens=_per(measured.mesh_cpu_s, load.num_tokens, 1e6),
            cpu_s={name: round(cpu, 3) for name, cpu in measured.cpu_s.items()},
            others_cores=measured.others_cpu_s / load.duration_s,
            num_events=load.num_events,
            window_s=load.duration_s,
            num_requests=load.num_requests,
            num_stuck=load.num_stuck,
            errors=dict(load.errors),
        )


def _per(amount: float, count: int, unit: float) -> float:
    return amount / count * unit if count else float("nan")


@dataclass(frozen=True, slots=True)
class Bare:
    """The engine called directly, without the mesh, one request at a time."""

    ttft_ms: tuple[float, float, float]
    per_token_us: float
    num_requests: int


def describe_machine() -> str:
    cpu = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.split(":", 1)[1].strip()
    memory = psutil.virtual_memory().total / 2**30
    return f"{psutil.cpu_count()} x {cpu}, {memory:.0f} GiB, {platform.platform()}"


def describe_versions() -> dict[str, str]:
    command = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    versions = {"pdmesh commit": commit.stdout.strip(), "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return versions


def quantile(ordered: Sequence[float], q: float) -> float:
    """The value that a share `q` of the values does not exceed. There must be a value."""
    return ordered[int(q * (len(ordered) - 1))]


def write(out: Path, module: str, title: str, about: str, text: str, **found: object) -> None:
    """Write OUT.json and OUT.md.

    OUT.json has the values in `found`, with the command, machine, versions and conditions. OUT.md
    has `text` below `title` and `about`.
    """
    command, machine = shlex.join(["python", "-m", module, *sys.argv[1:]]), describe_machine()
    versions = describe_versions()
    conditions = (
        f"{_BEGAN}, commit {versions['pdmesh commit'] or 'unknown'}, load average before "
        f"{_LOAD_BEFORE:.1f}"
    )
    data = {
        "command": command,
        "machine": machine,
        "conditions": conditions,
        "versions": versions,
        **found,
    }
    out.with_suffix(".json").write_text(json.dumps(data, indent=1) + "\n")
    page = f"# {title}\n\n`{command}`, {machine}, {conditions}\n\n{about}\n\n{text}\n"
    out.with_suffix(".md").write_text(page)


@dataclass(slots=True)
class Run:
    """The measurements of one run, and how to repeat it."""

    engine: str
    mesh: str
    prompt: str
    load_before: tuple[float, float, float]
    rounds: list[list[Cell]] = field(default_factory=list)
    bare: list[Bare] = field(default_factory=list)
    ceiling: list[Cell] = field(default_factory=list)
    passthrough: list[Cell] = field(default_factory=list)
    num_dropped: int = 0  # windows that were dropped because other load disturbed them
    began: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    command: str = field(
        default_factory=lambda: shlex.join(
            ["python", "-m", "loadtests.gateway.overhead", *sys.argv[1:]]
        )
    )
    machine: str = field(default_factory=describe_machine)
    versions: dict[str, str] = field(default_factory=describe_versions)

    def cells(self, scenario: str) -> list[Cell]:
        return [cell for cells in self.rounds for cell in cells if cell.scenario == scenario]

    def passed_through(self, scenario: str) -> list[Cell]:
        return [cell for cell in self.passthrough if cell.scenario == scenario]

    def scenarios(self) -> list[str]:
        return list(dict.fromkeys(cell.scenario for cells in self.rounds for cell in cells))

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)


@dataclass(frozen=True, slots=True)
class Spread:
    """The median, the lowest and the highest value over the rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))

    def text(self, form: str) -> str:
        middle = format(self.median, form)
        return f"{middle} ({format(self.low, form)}..{format(self.high, form)})"


def spread_table(
    first: Sequence[str],
    columns: Sequence[tuple[str, Callable[[T], float], str]],
    rows: Iterable[tuple[Sequence[object], Sequence[T]]],
) -> str:
    """A Markdown table. A row has its `first` cells, then a cell for each column.

    A column is (name, value, format). Its cell shows the median (lowest..highest) over the row's
    runs.
    """
    names = [*first, *(name for name, _, _ in columns)]
    lines = [f"| {' | '.join(names)} |", "|" + "---|" * len(names)]
    for cells, runs in rows:
        spreads = [Spread.of([value(r) for r in runs]).text(form) for _, value, form in columns]
        lines.append(f"| {' | '.join([*map(str, cells), *spreads])} |")
    return "\n".join(lines)
