"""Reports each pooling call to operators: counters, one log line, one event, one span."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from opentelemetry.trace import Span

from pdmesh.events.v1.events_pb2 import RequestFinished
from pdmesh.services.gateway.pooling.batch import PoolingBatch
from pdmesh.services.gateway.pooling.spec import PoolingSpec
from pdmesh.services.gateway.request.observer import CallFacts, Observer
from pdmesh.telemetry import names, traces
from pdmesh.v1.common_pb2 import Usage


@dataclass(slots=True)
class PoolingReport:
    """The facts about one call, filled in while the call runs."""

    spec: PoolingSpec
    request_id: str
    span: Span
    outcome: str = "failed"  # completed, failed, cancelled
    reason: str = "INTERNAL"
    num_cached_tokens: int = 0
    started_at: float = field(default_factory=time.monotonic)


def start_span(spec: PoolingSpec, traceparent: str) -> Span:
    name = names.SPAN_CALL.format(operation=spec.operation, model=spec.model.name)
    return traces.start_root(name, traceparent)


def report_call(observer: Observer, report: PoolingReport, batches: Sequence[PoolingBatch]) -> None:
    spec, e2e_s = report.spec, time.monotonic() - report.started_at
    accepted = min((b.accepted_at for b in batches if b.accepted_at), default=0.0)
    queue_s = max(0.0, accepted - report.started_at) if accepted else 0.0
    facts = CallFacts(
        report.request_id,
        spec.operation,
        spec.model.name,
        report.outcome,
        report.reason,
        spec.num_tokens,
        e2e_s,
    )
    event = RequestFinished(
        request_id=report.request_id,
        model=spec.model.name,
        scenario=spec.scenario or "default",
        outcome=report.outcome,
        reason=report.reason,
        usage=Usage(num_prompt_tokens=spec.num_tokens, num_cached_tokens=report.num_cached_tokens),
        num_rejections=sum(b.life.num_rejections for b in batches),
        num_migrations=sum(b.life.num_losses for b in batches),
        queue_ms=queue_s * 1000,
        e2e_ms=e2e_s * 1000,
        operation=spec.operation,
        pooling_id=batches[0].instance_id if batches else "",
    )
    observer.on_pooled(facts, event, report.span)
