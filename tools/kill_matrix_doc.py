"""docs/kill-matrix.md from what the last run of the kill matrix measured, or of the faults of KV:
the other table stays as it is.

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
_KV_HEADING: Final = "## Faults of KV: bound and measured\n"
_KV_HEAD: Final = f"""\
{_KV_HEADING}
Measured by `make kv-faults` ({{machine}}, shared by everything as above). What a client waited for, in meshes of two prefills and two decodes on the
sim engine: every stream ended with exactly the text of a single sim model.

- **in peace**: the longest silence that a client saw in the same streams in the same mesh, before the fault, first token included.
- **with the fault**: the longest silence beside it. Where there is no **in peace** it is the time until what is told was so, with a gateway (F27) or
  a file tier (F33) alone.
- **bound**: what the fault may cost beyond peace. **test allows**: the bound, and for the machine as much again as peace took, at least 1 s.

Of several runs of a fault, that which cost most beyond peace.

| fault | what happens | in peace s | with the fault s | bound s | test allows s |
|---|---|---:|---:|---:|---:|
"""
_ORDER: Final = ("prefill", "decode", "gateway", "master", "kv-cache", "health", "nats", "valkey")


def main() -> None:
    results, target = Path(sys.argv[1]), Path(sys.argv[2])
    target.write_text(page(target.read_text(), results))


def page(before: str, results: Path) -> str:
    """With the tables that there are results for."""
    processes, kv = _read(results), _read(results / "kv")
    if not processes and not kv:
        sys.exit(f"no results in {results}")
    machine = f"{platform.machine()}, {len(_cpus())} cores"
    first, heading, second = before.partition(_KV_HEADING)
    if processes:
        first = _HEAD.format(machine=machine) + "".join(map(_line, sorted(processes, key=_rank)))
    second = heading + second
    if kv:
        second = _KV_HEAD.format(machine=machine) + "".join(map(_kv_line, _worst(kv)))
    return f"{first.rstrip()}\n\n{second}".rstrip() + "\n"


def _read(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def _worst(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each fault and what happens, the run that cost most; by the fault's number."""
    worst: dict[tuple[int, str], dict[str, Any]] = {}
    for row in sorted(rows, key=lambda r: float(r["took_s"]) - float(r["peace_s"])):
        worst[int(row["fault"][1:]), str(row["what"])] = row
    return [row for _, row in sorted(worst.items())]


def _kv_line(row: dict[str, Any]) -> str:
    cells = (
        row["fault"], row["what"], row["peace_s"] or "-", row["took_s"], row["bound_s"],
        row["allowed_s"],
    )  # fmt: skip
    return "| " + " | ".join(map(str, cells)) + " |\n"


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
