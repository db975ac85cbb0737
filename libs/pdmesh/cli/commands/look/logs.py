"""`pdmesh logs`: shows the logs of the mesh that was started here, even after it has stopped."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Final

from pdmesh.cli.errors import CommandFailed
from pdmesh.cli.view.log_files import files_of, read_logs
from pdmesh.cli.view.log_lines import LogLine, LogTail, as_text, followed, latest
from pdmesh.core.suggestion import suggestion

_PAUSE_S: Final = 0.2  # between two reads of the files


def run(options: argparse.Namespace) -> int:
    folder = options.state_dir / "logs"
    _check_processes(folder, options.processes)
    try:
        _show(options, folder)
    except KeyboardInterrupt:
        if not options.follow:
            raise
    return 0


def _show(options: argparse.Namespace, folder: Path) -> None:
    # The tails begin before the files are read, so that no line is missed. A line that is written
    # while the files are read may be shown twice.
    tails = _Tails(folder, options.processes)
    _print(options, latest(_chosen(options, read_logs(folder, options.processes)), options.lines))
    if options.follow:
        _print(options, _chosen(options, followed(tails.known, partial(time.sleep, _PAUSE_S))))


def _check_processes(folder: Path, asked: Iterable[str]) -> None:
    known = [file.stem for file in files_of(folder)]
    for process in asked:
        if process not in known:
            hint = suggestion(process, known) or f"; there are {', '.join(known)}"
            raise CommandFailed(f"no log of {process}{hint}")


def _chosen(options: argparse.Namespace, lines: Iterable[LogLine]) -> Iterator[LogLine]:
    for line in lines:
        if options.request and options.request not in line.text:
            continue
        if options.level and not line.has_level(options.level):
            continue
        yield line


def _print(options: argparse.Namespace, lines: Iterable[LogLine]) -> None:
    for line in lines:
        print(line.text if options.output == "json" else as_text(line), flush=options.follow)


class _Tails:
    """The growing ends of the log files, also of files that processes begin later."""

    def __init__(self, folder: Path, processes: Iterable[str]) -> None:
        self._folder, self._processes = folder, tuple(processes)
        self._tails = {f: LogTail(f, f.stat().st_size) for f in files_of(folder, self._processes)}

    def known(self) -> list[tuple[str, LogTail]]:
        for file in files_of(self._folder, self._processes):
            self._tails.setdefault(file, LogTail(file, 0))
        return [(file.stem, tail) for file, tail in sorted(self._tails.items())]
