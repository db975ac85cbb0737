"""The trace context that travels between processes."""

from __future__ import annotations

import pytest
from opentelemetry import trace

from pdmesh.telemetry import traces

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_a_traceparent_is_passed_on_unchanged() -> None:
    context = traces.context_from(PARENT)
    assert context is not None
    assert traces.traceparent(trace.get_current_span(context)) == PARENT


@pytest.mark.parametrize(
    "text",
    ["", "garbage", PARENT.upper(), PARENT[:-1], PARENT + "0", "00-" + "0" * 32 + PARENT[35:]],
)
def test_an_invalid_traceparent_starts_a_new_trace(text: str) -> None:
    assert traces.context_from(text) is None


@pytest.mark.parametrize(
    ("flags", "is_recorded"), [("01", True), ("03", True), ("00", False), ("02", False)]
)
def test_a_trace_is_recorded_if_its_sampled_flag_is_set_whatever_the_other_flags_are(
    flags: str, is_recorded: bool
) -> None:
    """A root span of the SDK also sets the random flag. The children of such spans were once
    lost.
    """
    assert (traces.sampled_context(PARENT[:-2] + flags) is not None) == is_recorded


def test_an_invalid_traceparent_is_not_recorded() -> None:
    assert traces.sampled_context("") is None
    assert traces.sampled_context(PARENT[:-1]) is None


def test_outside_a_trace_there_is_nothing_to_pass_on() -> None:
    assert traces.current_traceparent() == ""


def test_a_request_has_ids_even_without_a_recorder_and_keeps_its_callers_trace_id() -> None:
    first, second = (traces.start_root("chat", "").get_span_context() for _ in range(2))
    assert first.is_valid
    assert first.trace_id != second.trace_id
    inherited = traces.start_root("chat", PARENT).get_span_context()
    assert inherited.trace_id == int(PARENT[3:35], 16)
