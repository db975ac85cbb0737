"""Makes OpenTelemetry spans for legs: one for a leg's computation, one for its KV transfer.

Spans are made only if the gateway's trace is sampled, because each span costs 20 us.
"""

from __future__ import annotations

from opentelemetry.trace import Span, SpanKind, Status, StatusCode

from pdmesh.telemetry import names, traces


def start(name: str, traceparent: str, request_id: str, attempt: int) -> Span | None:
    """Start a span. Returns None unless `traceparent` is valid and sampled."""
    context = traces.sampled_context(traceparent)
    if context is None:
        return None
    attributes: dict[str, str | int] = {
        names.ATTR_REQUEST_ID: request_id,
        names.ATTR_ATTEMPT: attempt,
    }
    kind = SpanKind.CLIENT if name == names.SPAN_KV_TRANSFER else SpanKind.SERVER
    return traces.tracer().start_span(name, context, kind, attributes=attributes)


def end(span: Span | None, failure: str = "", **attributes: int) -> None:
    """End a span with these attributes.

    An attribute's name is written with double underscores for dots: `pdmesh__kv__bytes`.
    """
    if span is None:
        return
    for name, value in attributes.items():
        span.set_attribute(name.replace("__", "."), value)
    if failure:
        span.set_attribute(names.ATTR_REASON, failure)
        span.set_status(Status(StatusCode.ERROR, failure))
    span.end()
