"""Collects the steps of one request from the processes' logs, for `pdmesh trace`.

The gateway logs one line at a request's end, with the times of the request's stages and its lost
legs. A leg is a request's stay on one instance. Instances log only failures. So a successful
request has a single line.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Final

from pdmesh.cli.view.log_lines import LogLine, event_of
from pdmesh.core.history.ended_request import key_of
from pdmesh.core.history.request_story import MAX_STEPS, Step, stages

_FINISHED: Final = "request.finished"


def lines_about(request_id: str, lines: Iterable[LogLine]) -> list[LogLine]:
    """The lines about a request. `request_id` may be any id that clients or operators see."""
    key = key_of(request_id)
    return [line for line in lines if key in str(line.entry.get("request_id", ""))]


def story(lines: Iterable[LogLine]) -> list[Step]:
    """The request's steps in the order of their times, at most `MAX_STEPS`."""
    steps: list[Step] = []
    for line in lines:
        if len(steps) >= MAX_STEPS:
            break
        is_report = line.entry.get("event") == _FINISHED
        steps += stages(line.entry, line.process, _seconds(line.at)) if is_report else [_told(line)]
    return sorted(steps, key=lambda step: step.at)[:MAX_STEPS]


def as_rows(steps: Iterable[Step]) -> Iterator[tuple[str, str, str, str]]:
    """The time of day, milliseconds since the first step, the process, and what happened."""
    first: float | None = None
    for step in steps:
        first = step.at if first is None else first
        clock = datetime.fromtimestamp(step.at, UTC).strftime("%H:%M:%S.%f")[:12]
        yield clock, f"{(step.at - first) * 1000:+.1f} ms", step.process, step.what


def as_data(steps: Iterable[Step]) -> list[dict[str, object]]:
    return [asdict(step) for step in steps]


def _told(line: LogLine) -> Step:
    return Step(_seconds(line.at), line.process, event_of(line, ("request_id", "trace_id")))


def _seconds(at: str) -> float:
    try:
        return datetime.fromisoformat(at).timestamp()
    except ValueError:
        return 0.0
