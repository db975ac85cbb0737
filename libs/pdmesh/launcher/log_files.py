"""The log files of the launcher's child processes, whose size is bounded.

Each child appends to its own file, so a busy launcher never blocks a child. If a file is too large,
the launcher copies it to `<name>.log.1` and truncates it. The child then continues at the start of
the file.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Final

MAX_BYTES: Final = 16 * 1024 * 1024
_LAST_LINES: Final = 5
_TAIL_BYTES: Final = 16 * 1024
_MAX_CHARS: Final = 300


def bound(paths: Iterable[Path], max_bytes: int = MAX_BYTES) -> None:
    for path in paths:
        if path.exists() and path.stat().st_size > max_bytes:
            _set_aside(path)
            os.truncate(path, 0)


def _set_aside(path: Path) -> None:
    """Copy a log to `<name>.log.1`. On a full disk, make no copy: logs may have filled the disk."""
    aside = path.with_suffix(".log.1")
    try:
        aside.touch(mode=0o600)
        shutil.copyfile(path, aside)
    except OSError:
        aside.unlink(missing_ok=True)


def append(path: Path, line: str) -> None:
    """Append a line. If the disk is full, the line is lost."""
    with contextlib.suppress(OSError), path.open("a") as file:
        file.write(f"{line}\n")


def last_word(path: Path) -> str:
    """The probable cause of a process's death: the last line of its log, and the log's path."""
    lines = last_lines(path)
    return f"{_reason(lines[-1]) if lines else 'it logged nothing'} (log: {path})"


def last_lines(path: Path) -> list[str]:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return [line for line in text.splitlines() if line.strip()][-_LAST_LINES:]


def _reason(line: str) -> str:
    """The reason in a log line: the exception, reason or event of a JSON line, or else its text."""
    try:
        entry = json.loads(line)
    except ValueError:
        return line.strip()[:_MAX_CHARS]
    if not isinstance(entry, dict):
        return line.strip()[:_MAX_CHARS]
    if isinstance(entry.get("exception"), str):
        return str(entry["exception"]).strip().splitlines()[-1][:_MAX_CHARS]
    return str(entry.get("reason") or entry.get("event") or line)[:_MAX_CHARS]
