"""The numbers that the master reads from a gateway's report about a finished request."""

from __future__ import annotations

import msgspec
import pytest

from pdmesh.core.ratio.scenario_stats import RequestSample
from pdmesh.events.v1.events_pb2 import RequestFinished
from pdmesh.net.event_json import to_json
from pdmesh.services.master_scheduler.placement.scenario_feed import (
    RequestFinishedJson,
    finished_of,
)
from pdmesh.v1.common_pb2 import Usage


@pytest.mark.req("S138")
def test_every_number_arrives() -> None:
    event = RequestFinished(
        scenario="chat",
        outcome="completed",
        usage=Usage(num_prompt_tokens=100, num_completion_tokens=20, num_cached_tokens=64),
        queue_ms=1.5,
        ttft_ms=20.0,
        e2e_ms=300.0,
        kv_transfer_ms=4.0,
        decode_queue_ms=7.0,
    )
    event.header.occurred_at.FromNanoseconds(1)
    read = msgspec.json.decode(to_json(event), type=RequestFinishedJson)
    assert read.outcome == "completed"
    expected = RequestSample("chat", 100, 64, 20, 0.0015, 0.02, 0.3, 0.004, 0.007)
    assert finished_of(read) == expected


def test_zeros_are_not_written() -> None:
    read = msgspec.json.decode(to_json(RequestFinished()), type=RequestFinishedJson)
    assert finished_of(read).num_prompt_tokens == 0


def test_the_reason_of_a_failure_arrives() -> None:
    read = msgspec.json.decode(
        to_json(RequestFinished(reason="OVERLOADED")), type=RequestFinishedJson
    )
    assert read.reason == "OVERLOADED"
