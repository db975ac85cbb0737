"""docs/kill-matrix.md from what the last run of the kill matrix measured.

Usage: python -m tools.kill_matrix_doc RESULTS_DIR docs/kill-matrix.md
"""

from __future__ import annotations

import json
import platform
import sys
from pathlib import Path
from typing import Any, Final

_HEAD: Final = """\
# What happens when a process is hit

Measured by `make kill-matrix` ({machine}; the clients, every process of the mesh and the servers share these cores).
Two prefills, two decodes, one of each other service, sim engine; 32 streams of 120 tokens; one process is
killed (SIGKILL), asked to stop (SIGTERM), or frozen for 6 s (SIGSTOP, then SIGCONT) in the middle of it. One mesh takes all
cases one after the other.

- **complete**: streams that ended with exactly the text that a single sim model gives. The others ended with one clear error, or
  their connection was cut, or refused while nobody listened: both only where the process holding the client's connection was hit.
- **longest gap**: the longest silence any client saw, first token included. **bound**: what the test allows.
- **new request**: from the moment the process was ready again until a new request was answered.
- **freed**: until no instance held a slot, a ticket or staged bytes for any request.

| process | signal | complete | error | cut | longest gap s | bound s | new request s | freed s |
|---|---|---:|---:|---:|---:|---:|---:|---:|
"""
_ORDER: Final = ("prefill", "decode", "gateway", "master", "kv-cache", "health", "nats", "valkey")


def main() -> None:
    results, target = Path(sys.argv[1]), Path(sys.argv[2])
    rows = [json.loads(path.read_text()) for path in sorted(results.glob("*.json"))]
    if not rows:
        sys.exit(f"no results in {results}")
    machine = f"{platform.machine()}, {len(_cpus())} cores"
    target.write_text(_HEAD.format(machine=machine) + "".join(map(_line, sorted(rows, key=_rank))))


def _cpus() -> list[str]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return [line for line in lines if line.startswith("processor")]


def _rank(row: dict[str, Any]) -> tuple[int, str]:
    victim = str(row["victim"])
    return next(i for i, name in enumerate(_ORDER) if victim.startswith(name)), str(row["signal"])


def _line(row: dict[str, Any]) -> str:
    cells = (
        row["victim"], row["signal"], row["num_complete"], row["num_errors"], row["num_cut"],
        row["longest_gap_s"], row["gap_bound_s"], row["next_request_s"], row["freed_s"],
    )  # fmt: skip
    return "| " + " | ".join(map(str, cells)) + " |\n"


if __name__ == "__main__":
    main()
