"""Reads the log files of the mesh that was started in a folder."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from pdmesh.cli.errors import CommandFailed
from pdmesh.cli.view.log_lines import LogLine, in_order, of_process


def files_of(folder: Path, processes: Iterable[str] = ()) -> list[Path]:
    """The log files of these processes, or of all. Raises CommandFailed if the folder has none."""
    asked = set(processes)
    files = sorted(folder.glob("*.log"))
    if not files:
        raise CommandFailed(f"there are no logs in {folder}: no mesh was started here")
    return [file for file in files if not asked or file.stem in asked]


def read_logs(folder: Path, processes: Iterable[str] = ()) -> Iterator[LogLine]:
    """Every line of the logs, ordered by time. Raises CommandFailed if there are no log files."""
    return in_order(of_process(f.stem, _lines(f)) for f in files_of(folder, processes))


def _lines(file: Path) -> Iterator[str]:
    """The lines of the older file `.log.1`, then the lines of the file itself."""
    for part in (file.with_suffix(".log.1"), file):
        if part.exists():
            with part.open(errors="replace") as lines:
                yield from (line.rstrip("\n") for line in lines if line.strip())
