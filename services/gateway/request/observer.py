"""Reports each call of a gateway to operators: counters, histograms, a log line, an event, a trace.

The report is made when the call is closed, from times that were noted before. So it never delays a
token. A choice is one answer of a call, and a leg is a choice's stay on one instance.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import msgspec
import structlog
from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind, StatusCode

from pdmesh.core.request.machine import Request
from pdmesh.events.v1.events_pb2 import RequestFinished
from pdmesh.net import subjects
from pdmesh.services.gateway.request.spec import CallSpec
from pdmesh.services.gateway.request.timings import Timings
from pdmesh.telemetry import metrics, names, traces
from pdmesh.v1.common_pb2 import Usage

log = structlog.get_logger(__name__)

_MAX_EVENTS: Final = 1024  # the most events that wait to be published; further ones are dropped
# Events are gathered for this time and then published in one burst. Each burst wakes the message
# bus and all subscribers. Publishing each event at once would take a tenth of their CPU time.
_GATHER_S: Final = 0.02

_accepted = metrics.counter(names.REQUESTS_ACCEPTED, "Calls that passed validation")
_requests = metrics.counter(names.REQUESTS, "Calls that ended, by outcome")
_rejections = metrics.histogram(
    names.REQUEST_REJECTIONS, "Rejections per call", "1", (0, 1, 2, 4, 8, 16, 32)
)
_migrations = metrics.counter(names.REQUEST_MIGRATIONS, "Choices planned again after a lost leg")
_duration = metrics.histogram(names.REQUEST_DURATION, "From acceptance to the last token")
_ttft = metrics.histogram(names.TIME_TO_FIRST_TOKEN, "From acceptance to the first token")
_tpot = metrics.histogram(
    names.TIME_PER_OUTPUT_TOKEN,
    "Mean time between output tokens",
    # The 13 buckets of OpenTelemetry's conventions, and 13 more from 1 to 60 ms for fast models.
    buckets=(
        0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.008, 0.01, 0.0125, 0.015, 0.02, 0.025, 0.03,
        0.04,
        0.05, 0.06, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5,
    ),
)  # fmt: skip
_tokens = metrics.counter(names.GATEWAY_TOKENS, "Tokens by direction")
_cached = metrics.counter(
    names.GATEWAY_CACHED_TOKENS, "Tokens of prompts that were found in a cache"
)
_dropped = metrics.counter(names.GATEWAY_EVENTS_DROPPED, "RequestFinished events not published")


class Publisher(Protocol):
    """The part of `pdmesh.net.events.EventPublisher` that is used here."""

    async def publish(self, subject: str, message: RequestFinished) -> None: ...


class CallReport(msgspec.Struct, frozen=True):
    """The facts of a closed call for generated text."""

    request_id: str
    spec: CallSpec
    span: Span
    outcome: str  # completed, failed, cancelled
    reason: str
    started_at: float
    timings: Sequence[Timings]
    cores: Sequence[Request]
    num_prompt_tokens: int
    num_completion_tokens: int
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class CallFacts:
    """The facts of a closed call for vectors or scores."""

    request_id: str
    operation: str
    model: str
    outcome: str
    reason: str
    num_tokens: int
    e2e_s: float


class Observer:
    def __init__(self, gateway_id: str, publisher: Publisher | None) -> None:
        self._subject = subjects.request_finished(gateway_id)
        self._publisher = publisher
        self._events: list[RequestFinished] = []
        self._has_events = asyncio.Event()
        self.num_accepted = 0
        self.num_ended: dict[str, int] = {"completed": 0, "failed": 0, "cancelled": 0}

    async def run(self) -> None:
        """Publish events in bursts, so that no request waits for the message bus."""
        while True:
            await self._has_events.wait()
            await asyncio.sleep(_GATHER_S)
            await self.publish_rest()

    async def publish_rest(self) -> None:
        """Publish the events that have gathered by now."""
        events, self._events = self._events, []
        self._has_events.clear()
        if self._publisher is not None:
            for event in events:
                await self._publisher.publish(self._subject, event)

    def start_span(self, spec: CallSpec, traceparent: str) -> Span:
        name = names.SPAN_CALL.format(operation=spec.operation, model=spec.model)
        return traces.start_root(name, traceparent)

    def on_accepted(self) -> None:
        self.num_accepted += 1
        _accepted.add(1)

    def on_closed(self, report: CallReport) -> None:
        self.num_ended[report.outcome] += 1
        times = _Times(report)
        self._count(report, times)
        self._log(report, times)
        self._publish(report, times)
        if report.span.is_recording():
            _finish_spans(report)
        report.span.end()

    def _count(self, report: CallReport, times: _Times) -> None:
        kind = {
            names.ATTR_OPERATION: report.spec.operation,
            names.ATTR_PROVIDER: names.PROVIDER,
            names.ATTR_REQUEST_MODEL: report.spec.model,
        }
        failure = {names.ATTR_ERROR_TYPE: report.reason} if report.outcome == "failed" else {}
        _count_call(report.spec.model, report.outcome, report.reason)
        _duration.record(times.e2e_s, kind | failure if failure else kind)
        if times.ttft_s:
            _ttft.record(times.ttft_s, kind)
        if report.num_completion_tokens > len(report.cores):
            _tpot.record(times.per_token_s, kind)
        _count_tokens(report.spec.model, "input", report.num_prompt_tokens)
        _cached.add(report.num_cached_tokens, {names.ATTR_REQUEST_MODEL: report.spec.model})
        _count_tokens(report.spec.model, "output", report.num_completion_tokens)
        _rejections.record(times.num_rejections)
        if times.num_migrations:
            _migrations.add(times.num_migrations)

    def _log(self, report: CallReport, times: _Times) -> None:
        log.info(
            "request.finished",
            request_id=report.request_id,
            trace_id=_trace_id(report.span),
            operation=report.spec.operation,
            model=report.spec.model,
            outcome=report.outcome,
            reason=report.reason,
            num_prompt_tokens=report.num_prompt_tokens,
            num_completion_tokens=report.num_completion_tokens,
            num_cached_tokens=report.num_cached_tokens,
            num_rejections=times.num_rejections,
            num_migrations=times.num_migrations,
            prefill_id=report.cores[0].prefill_id,
            decode_id=report.cores[0].decode_id,
            plan_ms=round(times.plan_s * 1000, 3),
            queue_ms=round(times.queue_s * 1000, 3),
            ttft_ms=round(times.ttft_s * 1000, 3),
            e2e_ms=round(times.e2e_s * 1000, 3),
            kv_transfer_ms=round(times.kv_transfer_s * 1000, 3),
            decode_queue_ms=round(times.decode_queue_s * 1000, 3),
            **({"losses": losses} if (losses := _losses(report)) else {}),
        )

    def _publish(self, report: CallReport, times: _Times) -> None:
        if self._publisher is None:
            return
        event = RequestFinished(
            request_id=report.request_id,
            operation=report.spec.operation,
            trace_id=_trace_id(report.span),
            model=report.spec.model,
            scenario=report.spec.scenario or "default",
            outcome=report.outcome,
            reason=report.reason,
            usage=Usage(
                num_prompt_tokens=report.num_prompt_tokens,
                num_completion_tokens=report.num_completion_tokens,
                num_cached_tokens=report.num_cached_tokens,
            ),
            prefill_id=report.cores[0].prefill_id,
            decode_id=report.cores[0].decode_id,
            num_rejections=times.num_rejections,
            num_migrations=times.num_migrations,
            queue_ms=times.queue_s * 1000,
            ttft_ms=times.ttft_s * 1000,
            e2e_ms=times.e2e_s * 1000,
            kv_transfer_ms=times.kv_transfer_s * 1000,
            decode_queue_ms=times.decode_queue_s * 1000,
            losses=[_loss_to(loss) for loss in _losses(report)],
            expected_ms=report.cores[0].expected_s * 1000,
            planned_ms=times.plan_s * 1000,
        )
        self._add(event)

    def on_pooled(self, facts: CallFacts, event: RequestFinished, span: Span) -> None:
        """Report a closed call for vectors or scores. `event` lacks only the trace id."""
        self.num_ended[facts.outcome] += 1
        kind = {
            names.ATTR_OPERATION: facts.operation,
            names.ATTR_PROVIDER: names.PROVIDER,
            names.ATTR_REQUEST_MODEL: facts.model,
        }
        failure = {names.ATTR_ERROR_TYPE: facts.reason} if facts.outcome == "failed" else {}
        _count_call(facts.model, facts.outcome, facts.reason)
        _duration.record(facts.e2e_s, kind | failure)
        _count_tokens(facts.model, "input", facts.num_tokens)
        _rejections.record(event.num_rejections)
        if event.num_migrations:
            _migrations.add(event.num_migrations)
        event.trace_id = _trace_id(span)
        log.info(
            "request.finished",
            request_id=facts.request_id,
            trace_id=event.trace_id,
            operation=facts.operation,
            model=facts.model,
            outcome=facts.outcome,
            reason=facts.reason,
            num_prompt_tokens=facts.num_tokens,
            num_cached_tokens=event.usage.num_cached_tokens,
            num_rejections=event.num_rejections,
            num_migrations=event.num_migrations,
            pooling_id=event.pooling_id,
            queue_ms=round(event.queue_ms, 3),
            e2e_ms=round(event.e2e_ms, 3),
        )
        self._add(event)
        for name, value in kind.items():
            span.set_attribute(name, value)
        span.set_attribute(names.ATTR_INPUT_TOKENS, facts.num_tokens)
        span.set_attribute(names.ATTR_REQUEST_ID, facts.request_id)
        span.set_attribute(names.ATTR_OUTCOME, facts.outcome)
        if failure:
            span.set_attribute(names.ATTR_ERROR_TYPE, facts.reason)
            span.set_status(StatusCode.ERROR)
        span.end()

    def _add(self, event: RequestFinished) -> None:
        if self._publisher is None:
            return
        if len(self._events) >= _MAX_EVENTS:
            _dropped.add(1)
            return
        self._events.append(event)
        self._has_events.set()


def _count_call(model: str, outcome: str, reason: str) -> None:
    labels = {
        names.ATTR_OUTCOME: outcome,
        names.ATTR_REASON: reason,
        names.ATTR_REQUEST_MODEL: model,
    }
    _requests.add(1, labels)


def _count_tokens(model: str, direction: str, num_tokens: int) -> None:
    _tokens.add(num_tokens, {"direction": direction, names.ATTR_REQUEST_MODEL: model})


class _Times:
    """The durations of a call in seconds, and its counts.

    `e2e_s`, `per_token_s` and the counts are for the whole call, the other durations for its first
    choice. A duration is 0 if the call ended before the duration could be measured.
    """

    __slots__ = (
        "decode_queue_s",
        "e2e_s",
        "kv_transfer_s",
        "num_migrations",
        "num_rejections",
        "per_token_s",
        "plan_s",
        "queue_s",
        "ttft_s",
    )

    def __init__(self, report: CallReport) -> None:
        first, start = report.timings[0], report.started_at
        ended = max([t.ended for t in report.timings], default=0.0) or time.monotonic()
        self.e2e_s = ended - start
        self.plan_s = max(0.0, first.planned - start)
        self.queue_s = max(0.0, first.accepted - start)
        self.ttft_s = max(0.0, first.first_token - start)
        self.kv_transfer_s = first.kv_transfer_us / 1e6
        self.decode_queue_s = first.decode_queue_s
        num_gaps = max(1, report.num_completion_tokens // len(report.cores) - 1)
        self.per_token_s = max(0.0, ended - first.first_token) / num_gaps if self.ttft_s else 0.0
        self.num_rejections = sum([c.num_rejections for c in report.cores])
        self.num_migrations = sum([c.num_migrations for c in report.cores])


def _losses(report: CallReport) -> list[dict[str, Any]]:
    """The lost legs of all choices, as fields for the call's log line and event."""
    return [
        {
            "choice": choice,
            "at_ms": round((loss.at - report.started_at) * 1000, 3),
            "instances": loss.instance_ids,
            "cause": loss.cause,
            "num_tokens": loss.num_emitted,
        }
        for choice, core in enumerate(report.cores)
        for loss in core.losses
    ]


def _loss_to(loss: dict[str, Any]) -> RequestFinished.Loss:
    return RequestFinished.Loss(
        at_ms=loss["at_ms"],
        instance_ids=loss["instances"],
        cause=loss["cause"],
        num_tokens=loss["num_tokens"],
        choice=loss["choice"],
    )


def _trace_id(span: Span) -> str:
    context = span.get_span_context()
    return f"{context.trace_id:032x}" if context.is_valid else ""


def _finish_spans(report: CallReport) -> None:
    """Set the root span's attributes, and add a child span for the planning of each choice.

    The instances make the spans of their own work.
    """
    span = report.span
    span.set_attribute(names.ATTR_OPERATION, report.spec.operation)
    span.set_attribute(names.ATTR_PROVIDER, names.PROVIDER)
    span.set_attribute(names.ATTR_REQUEST_MODEL, report.spec.model)
    span.set_attribute(names.ATTR_INPUT_TOKENS, report.num_prompt_tokens)
    span.set_attribute(names.ATTR_OUTPUT_TOKENS, report.num_completion_tokens)
    span.set_attribute(names.ATTR_CACHED_TOKENS, report.num_cached_tokens)
    span.set_attribute(names.ATTR_REQUEST_ID, report.request_id)
    span.set_attribute(names.ATTR_OUTCOME, report.outcome)
    if report.outcome == "failed":
        span.set_attribute(names.ATTR_ERROR_TYPE, report.reason)
        span.set_status(StatusCode.ERROR)
    to_unix_ns = _wall_clock()

    def child(name: str, parent: Span, kind: SpanKind, start: float, end: float) -> Span:
        context, began = trace.set_span_in_context(parent), to_unix_ns(start)
        made = traces.tracer().start_span(name, context, kind, start_time=began)
        made.end(end_time=to_unix_ns(end))
        return made

    for t in report.timings:
        if 0 < t.submitted <= t.planned:
            plan = child(names.SPAN_PLAN, span, SpanKind.CLIENT, t.submitted, t.planned)
            if t.asked:
                child(names.SPAN_PLAN_HASH, plan, SpanKind.INTERNAL, t.submitted, t.asked)


def _wall_clock() -> Callable[[float], int]:
    """Make a function that turns monotonic times into the wall-clock times of spans."""
    offset_ns = time.time_ns() - time.monotonic_ns()
    return lambda at: int(at * 1e9) + offset_ns
