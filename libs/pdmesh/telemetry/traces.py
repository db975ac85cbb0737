"""OpenTelemetry traces: one per request, passed between processes as a W3C `traceparent` string.

Without a collector no span is recorded, but trace ids are still made and passed on. So the
`trace_id` connects the log lines of one request in all services, at almost no cost.
"""

from __future__ import annotations

import re
from typing import Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased, Sampler
from opentelemetry.trace import (
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    TraceFlags,
    Tracer,
)

_TRACEPARENT: Final = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_tracer = trace.get_tracer("pdmesh")
_is_recorded = False
_ids = RandomIdGenerator()


def configure(
    resource: Resource, otlp_endpoint: str | None, processor: SpanProcessor | None = None
) -> TracerProvider:
    """Record spans, if there is a collector at `otlp_endpoint` or (in tests) a `processor`."""
    global _is_recorded
    _is_recorded = bool(otlp_endpoint) or processor is not None
    provider = TracerProvider(
        resource=resource,
        sampler=None if _is_recorded else _ids_only(),
        shutdown_on_exit=False,
    )
    if otlp_endpoint:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # optional and slow
            OTLPSpanExporter,
        )

        exporter = OTLPSpanExporter(endpoint=f"{otlp_endpoint.rstrip('/')}/v1/traces")
        provider.add_span_processor(BatchSpanProcessor(exporter))
    if processor is not None:
        provider.add_span_processor(processor)
    trace.set_tracer_provider(provider)
    return provider


def _ids_only() -> Sampler:
    """A sampler that records nothing, even if the parent span was sampled elsewhere."""
    return ParentBased(ALWAYS_OFF, remote_parent_sampled=ALWAYS_OFF)


def tracer() -> Tracer:
    return _tracer


def start_root(name: str, parent: str) -> Span:
    """Start the span of a request. If `parent` is a traceparent, the span belongs to its trace.

    Without a collector and without a parent, the span only has ids.
    """
    context = context_from(parent) if parent else None
    if context is not None or _is_recorded:
        return _tracer.start_span(name, context=context, kind=SpanKind.SERVER)
    ids = SpanContext(_ids.generate_trace_id(), _ids.generate_span_id(), is_remote=False)
    return NonRecordingSpan(ids)


def traceparent(span: Span) -> str:
    """The span as a `traceparent` header, or an empty string if the span has no trace."""
    context = span.get_span_context()
    if not context.is_valid:
        return ""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def current_traceparent() -> str:
    return traceparent(trace.get_current_span())


def sampled_context(parent: str) -> Context | None:
    """A context for new spans. None unless `parent` is a traceparent of a recorded trace.

    Only the sampled flag is checked, because a trace that began here has the random flag as well
    (flags 03).
    """
    found = _TRACEPARENT.fullmatch(parent)
    is_sampled = found is not None and int(found[3], 16) & TraceFlags.SAMPLED
    return context_from(parent) if is_sampled else None


def context_from(parent: str) -> Context | None:
    """A context for new spans, or None if `parent` is not a valid traceparent."""
    found = _TRACEPARENT.fullmatch(parent)
    if not found:
        return None
    span = SpanContext(
        trace_id=int(found[1], 16),
        span_id=int(found[2], 16),
        is_remote=True,
        trace_flags=TraceFlags(int(found[3], 16)),
    )
    return trace.set_span_in_context(NonRecordingSpan(span)) if span.is_valid else None
