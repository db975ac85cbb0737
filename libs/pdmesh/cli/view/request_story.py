"""What happened to one request, step by step, as the processes' logs tell it.

The gateway logs a request once, at its end, with the times of its stages and what it lost on the
way. Instances log only what failed. So a request that went well costs one line.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, Final

from pdmesh.cli.view.log_lines import LogLine, event_of

_FINISHED: Final = "request.finished"
_ID: Final = re.compile(r"[0-9a-f]{24}")  # within `req-...`, `chatcmpl-...`, `msg_...`
MAX_STEPS: Final = 200


@dataclass(frozen=True, slots=True)
class Step:
    """`at`: seconds since 1970. `process`: who tells it."""

    at: float
    process: str
    what: str


def lines_about(request_id: str, lines: Iterable[LogLine]) -> list[LogLine]:
    """The lines that name the request, by any of the ids that clients and operators see."""
    found = _ID.search(request_id)
    key = found.group() if found else request_id
    return [line for line in lines if key in str(line.entry.get("request_id", ""))]


def story(lines: Iterable[LogLine]) -> list[Step]:
    """The steps in the order of their times, at most `MAX_STEPS`."""
    steps: list[Step] = []
    for line in lines:
        if len(steps) >= MAX_STEPS:
            break
        steps += _stages(line) if line.entry.get("event") == _FINISHED else [_told(line)]
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


def _stages(line: LogLine) -> Iterator[Step]:
    entry, process = line.entry, line.process
    began = _seconds(line.at) - _ms(entry, "e2e_ms") / 1000

    def step(after_ms: float, what: str) -> Step:
        return Step(began + after_ms / 1000, process, what)

    about = f"{entry.get('operation', 'call')} of {entry.get('model', '?')}"
    yield step(0, f"accepted: {about}, {entry.get('num_prompt_tokens', 0)} prompt tokens")
    if _ms(entry, "plan_ms"):
        yield step(_ms(entry, "plan_ms"), "planned")
    if queue_ms := _ms(entry, "queue_ms"):
        tried = entry.get("num_rejections", 0)
        after = f" after {tried} rejections" if tried else ""
        by = entry.get("prefill_id") or entry.get("pooling_id") or "an instance"
        yield step(queue_ms, f"{by} took it{after}")
    if ttft_ms := _ms(entry, "ttft_ms"):
        cached = entry.get("num_cached_tokens", 0)
        yield step(ttft_ms, f"first token; {cached} tokens of the prompt came from a cache")
    if ttft_ms and (kv_ms := _ms(entry, "kv_transfer_ms")):
        waited_ms = _ms(entry, "decode_queue_ms")
        # Only the last decode is named, and these are the times of the first.
        decode = "a decode" if entry.get("losses") else entry.get("decode_id", "a decode")
        what = f"{decode} has the KV; it waited {waited_ms:.1f} ms, the KV took {kv_ms:.1f} ms"
        yield step(ttft_ms + waited_ms, what)
    for loss in entry.get("losses", ()):
        yield step(_ms(loss, "at_ms"), _lost(loss))
    ended = f"{entry.get('outcome', 'ended')}: {_tokens(entry.get('num_completion_tokens', 0))}"
    reason = entry.get("reason")
    last = entry.get("decode_id") or entry.get("prefill_id")
    where = f", the last ones from {last}" if last else ""
    yield step(_ms(entry, "e2e_ms"), f"{ended}{where}{f' ({reason})' if reason else ''}")


def _lost(loss: Mapping[str, Any]) -> str:
    """Any: a line of a log may hold anything."""
    instances = ", ".join(map(str, loss.get("instances", ()))) or "no instance"
    choice = f" of choice {loss['choice']}" if loss.get("choice") else ""
    cause = loss.get("cause", "no cause is told")
    return f"lost {instances} after {_tokens(loss.get('num_tokens', 0))}{choice}: {cause}"


def _tokens(number: object) -> str:
    return "1 token" if number == 1 else f"{number} tokens"


def _ms(entry: Mapping[str, Any], name: str) -> float:
    value = entry.get(name)
    return float(value) if isinstance(value, int | float) else 0.0


def _seconds(at: str) -> float:
    try:
        return datetime.fromisoformat(at).timestamp()
    except ValueError:
        return 0.0
