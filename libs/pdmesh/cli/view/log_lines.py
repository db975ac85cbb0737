"""Parses, merges and formats the log lines of several processes, in the order of their times."""

from __future__ import annotations

import heapq
import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

LEVELS: Final = ("debug", "info", "warning", "error", "critical")
_SHOWN_APART: Final = frozenset({"timestamp", "level", "event", "service", "instance", "exception"})
_READ_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line. `entry` is empty if the line is not a JSON object, for example one of NATS."""

    process: str
    at: str  # ISO 8601 in UTC; a line without a time gets the time of the line before
    text: str
    entry: dict[str, Any]

    def has_level(self, least: str) -> bool:
        level = self.entry.get("level")
        return level in LEVELS and LEVELS.index(level) >= LEVELS.index(least)


def of_process(process: str, lines: Iterable[str]) -> Iterator[LogLine]:
    at = ""
    for text in lines:
        entry = _entry(text)
        at = str(entry.get("timestamp") or at)
        yield LogLine(process, at, text, entry)


def in_order(logs: Iterable[Iterable[LogLine]]) -> Iterator[LogLine]:
    return heapq.merge(*logs, key=lambda line: line.at)


def latest(lines: Iterable[LogLine], num: int) -> list[LogLine]:
    """The last `num` lines."""
    return list(deque(lines, maxlen=num))


def as_text(line: LogLine) -> str:
    """Format a line, for example `12:00:01.250 gateway-0  warning leg.failed reason=PEER_LOST`."""
    if not line.entry:
        return f"{line.at[11:23]:12} {line.process}  {line.text}"
    level = str(line.entry.get("level", ""))
    words = [line.at[11:23], line.process, f" {level:7}", event_of(line)]
    exception = line.entry.get("exception")
    return " ".join(words) + (f"\n{exception}" if exception else "")


def event_of(line: LogLine, apart: Iterable[str] = ()) -> str:
    """Format the event and its fields, for example `leg.failed reason=PEER_LOST`.

    Fields in `apart` are left out.
    """
    hidden = _SHOWN_APART.union(apart)
    fields = [f"{k}={_short(v)}" for k, v in line.entry.items() if k not in hidden]
    return " ".join((str(line.entry.get("event", "")), *fields))


class LogTail:
    """Reads the lines that are appended to a file. After a truncation, reads from the start."""

    def __init__(self, path: Path, offset: int) -> None:
        self._path, self._offset, self._rest = path, offset, b""

    def new_lines(self) -> list[str]:
        """Read on from the last call, at most 1 MiB, and return the lines that are complete.

        Returns nothing if the file is gone.
        """
        try:
            with self._path.open("rb") as file:
                if self._path.stat().st_size < self._offset:
                    self._offset, self._rest = 0, b""
                file.seek(self._offset)
                data = file.read(_READ_BYTES)
        except OSError:
            return []
        self._offset += len(data)
        *whole, self._rest = (self._rest + data).split(b"\n")
        return [line.decode(errors="replace") for line in whole if line.strip()]


def followed(
    tails: Callable[[], Sequence[tuple[str, LogTail]]], pause: Callable[[], None]
) -> Iterator[LogLine]:
    """Yield appended lines forever. Each call of `tails` may return tails of new files."""
    while True:
        news = [list(of_process(name, tail.new_lines())) for name, tail in tails()]
        if not any(news):
            pause()
        yield from in_order(news)


def _entry(text: str) -> dict[str, Any]:
    if not text.startswith("{"):
        return {}
    try:
        entry = json.loads(text)
    except ValueError:
        return {}
    return entry if isinstance(entry, dict) else {}


def _short(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
