"""Writes docs/kill-matrix.md from test results.

The results may be those of the kill matrix, of the kill matrix across hosts, of the KV faults, or
several of these. A table without results stays as it is.

Usage: python -m tools.kill_matrix_doc RESULTS_DIR docs/kill-matrix.md
"""

from __future__ import annotations

import json
import platform
import sys
from pathlib import Path
from typing import Any, Final

_HEAD: Final = """\
# What happens when a process is killed, stopped or frozen

Measured by `make kill-matrix` ({machine}; clients, mesh and servers share these cores).
The mesh has two prefills, two decodes and one of each other service, with the sim engine. In the
middle of 32 streams of 120 tokens, one process is killed (SIGKILL), asked to stop (SIGTERM) or
frozen for 6 s (SIGSTOP, then SIGCONT). One mesh goes through all cases in turn.

- **complete**: streams that ended with exactly the text of a single sim model. Every other stream
  ended with one clear error, or its connection was cut or refused. A connection is cut or refused
  only if the process that holds it was killed, stopped or frozen.
- **longest gap**: the longest silence that any client saw, including the wait for the first token.
  **bound**: the longest gap that the test allows; it includes that of such streams without a fault.
- **new request**: the time from when the process was ready again until a new request was answered.
- **freed**: the time until no instance held a slot, a ticket or staged bytes for any request.

| process | signal | complete | error | cut | longest gap s | bound s | new request s | freed s |
|---|---|---:|---:|---:|---:|---:|---:|---:|
"""
_KV_HEADING: Final = "## Faults of KV: bound and measured\n"
_KV_HEAD: Final = f"""\
{_KV_HEADING}
Measured by `make kv-faults` ({{machine}}, shared as above), in meshes of two prefills and two
decodes with the sim engine. Every stream ended with exactly the text of a single sim model.

- **without it**: the longest silence that a client saw before the fault, in the same streams of the
  same mesh, including the wait for the first token.
- **with the fault**: the longest silence during and after the fault. Rows without a value in the
  column "without it" measure only a gateway (F27) or a file tier (F33): the time until the
  described state was reached.
- **bound**: the silence that the fault may add. **test allows**: the bound plus the time without
  the fault, plus that time again (at least 1 s) because the machine is shared.

If a fault was run several times, the table shows the run that added most.

| fault | what happens | without it s | with the fault s | bound s | test allows s |
|---|---|---:|---:|---:|---:|
"""
_HOSTS_HEADING: Final = "## Across hosts\n"
_HOSTS_HEAD: Final = f"""\
{_HOSTS_HEADING}
Measured by `make kill-matrix-hosts` ({{machine}}, shared as above). Three network namespaces
are hosts with their own addresses and mutual TLS, 2 ms each way and 0.1 % loss between any two of
them. They run `deploy/hosts/hosts.yaml` by the commands of [deploy.md](deploy.md): a NATS cluster
of three servers, Redis with two replicas and three sentinels, and two each of gateways, masters,
prefills and decodes. In the middle of 24 streams of 120 tokens, twelve at each gateway, one part of
the mesh fails. One mesh goes through all cases in turn.

- **complete**: streams with exactly the text of the run without faults, which is that of a single
  sim model. **cut**: streams of the gateway that was hit; they had the beginning of that text.
- **longest gap**: the longest silence that a client saw, except at a gateway that was hit.
  **bound**: the longest silence that the test allows; it includes the silence of the same streams
  without the fault (at least 1 s).
- **whole after**: the time from the end of the fault until every process was ready, every bucket
  had three current replicas, Redis had two replicas that followed, and both gateways answered. It
  is for information only. Most of it is the start of a host's processes.

| what | fault | complete | error | cut | longest gap s | bound s | whole after s |
|---|---|---:|---:|---:|---:|---:|---:|
"""
_ORDER: Final = ("prefill", "decode", "gateway", "master", "kv-cache", "health", "nats", "valkey")


def main() -> None:
    results, target = Path(sys.argv[1]), Path(sys.argv[2])
    target.write_text(page(target.read_text(), results))


def page(before: str, results: Path) -> str:
    """The page, with a new table for each kind of results that is there."""
    processes, hosts, kv = _read(results), _read(results / "hosts"), _read(results / "kv")
    if not (processes or hosts or kv):
        sys.exit(f"no results in {results}")
    machine = f"{platform.machine()}, {len(_cpus())} cores"
    rest, kv_heading, third = before.partition(_KV_HEADING)
    first, hosts_heading, second = rest.partition(_HOSTS_HEADING)
    if processes:
        first = _HEAD.format(machine=machine) + "".join(map(_line, sorted(processes, key=_rank)))
    second = hosts_heading + second
    if hosts:
        second = _HOSTS_HEAD.format(machine=machine) + "".join(map(_hosts_line, hosts))
    third = kv_heading + third
    if kv:
        third = _KV_HEAD.format(machine=machine) + "".join(map(_kv_line, _worst(kv)))
    parts = (part.rstrip() for part in (first, second, third))
    return "\n\n".join(part for part in parts if part) + "\n"


def _read(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def _worst(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each row of the table, the run in which the fault added most time. Rows are ordered by
    fault.
    """
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


def _hosts_line(row: dict[str, Any]) -> str:
    cells = (
        row["name"], row["what"], row["num_complete"], row["num_errors"], row["num_cut"],
        row["longest_gap_s"], row["gap_bound_s"], row["whole_s"],
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
