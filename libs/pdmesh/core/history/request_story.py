"""Tells what happened to one request, as steps with times.

The steps come from the report that the gateway makes when the request ends. A report is a line of
the gateway's log, or an event with the same fields.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

MAX_STEPS: Final = 200
_MAX_MS: Final = 1e12  # of a time in a report


@dataclass(frozen=True, slots=True)
class Step:
    """`at` is in seconds since 1970. `process` is the process that reported the step."""

    at: float
    process: str
    what: str


def stages(report: Mapping[str, Any], process: str, ended_at: float) -> Iterator[Step]:
    """The steps of a request that ended at `ended_at`, in seconds since 1970.

    A time in the report may have a value of any type, because log files may be edited.
    """
    began = ended_at - _ms(report, "e2e_ms") / 1000

    def step(after_ms: float, what: str) -> Step:
        return Step(began + after_ms / 1000, process, what)

    about = f"{report.get('operation', 'call')} of {report.get('model', '?')}"
    yield step(0, f"accepted: {about}, {report.get('num_prompt_tokens', 0)} prompt tokens")
    if _ms(report, "plan_ms"):
        yield step(_ms(report, "plan_ms"), "planned")
    if queue_ms := _ms(report, "queue_ms"):
        tried = report.get("num_rejections", 0)
        after = f" after {tried} rejections" if tried else ""
        by = report.get("prefill_id") or report.get("pooling_id") or "an instance"
        yield step(queue_ms, f"{by} took it{after}")
    if ttft_ms := _ms(report, "ttft_ms"):
        cached = report.get("num_cached_tokens", 0)
        yield step(ttft_ms, f"first token; {cached} tokens of the prompt came from a cache")
    if ttft_ms and (kv_ms := _ms(report, "kv_transfer_ms")):
        waited_ms = _ms(report, "decode_queue_ms")
        # The report names only the last decode, but these are the times of the first one.
        decode = "a decode" if report.get("losses") else report.get("decode_id", "a decode")
        what = f"{decode} has the KV; it waited {waited_ms:.1f} ms, the KV took {kv_ms:.1f} ms"
        yield step(ttft_ms + waited_ms, what)
    losses = report.get("losses")
    for loss in losses if isinstance(losses, list | tuple) else ():
        if isinstance(loss, dict):  # the report comes from a log file, which people may edit
            yield step(_ms(loss, "at_ms"), _lost(loss))
    ended = f"{report.get('outcome', 'ended')}: {_tokens(report.get('num_completion_tokens', 0))}"
    reason = report.get("reason")
    last = report.get("decode_id") or report.get("prefill_id")
    where = f", the last ones from {last}" if last else ""
    yield step(_ms(report, "e2e_ms"), f"{ended}{where}{f' ({reason})' if reason else ''}")


def _lost(loss: Mapping[str, Any]) -> str:
    named = loss.get("instances")
    ids = named if isinstance(named, list | tuple) else ()
    instances = ", ".join(map(str, ids)) or "no instance"
    choice = f" of choice {loss['choice']}" if loss.get("choice") else ""
    cause = loss.get("cause", "no cause is told")
    return f"lost {instances} after {_tokens(loss.get('num_tokens', 0))}{choice}: {cause}"


def _tokens(number: object) -> str:
    return "1 token" if number == 1 else f"{number} tokens"


def _ms(report: Mapping[str, Any], name: str) -> float:
    value = report.get(name)
    if isinstance(value, int | float) and abs(value) < _MAX_MS:  # false for NaN, too
        return float(value)
    return 0.0
