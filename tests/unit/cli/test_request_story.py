"""The story of a request: its stages, its losses, and lines about it in other processes' logs.

The stages come from the gateway's last line about the request.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from pdmesh.cli.view.log_lines import LogLine, of_process
from pdmesh.cli.view.request_story import as_rows, lines_about, story
from pdmesh.core.history.request_story import MAX_STEPS

KEY = "0123456789abcdef01234567"
ID = f"req-{KEY}"
FINISHED = {
    "event": "request.finished",
    "request_id": ID,
    "operation": "chat",
    "model": "m",
    "outcome": "completed",
    "reason": "",
    "num_prompt_tokens": 37,
    "num_completion_tokens": 8,
    "num_cached_tokens": 16,
    "num_rejections": 0,
    "prefill_id": "prefill-0",
    "decode_id": "decode-1",
    "plan_ms": 1.5,
    "queue_ms": 4,
    "ttft_ms": 100,
    "e2e_ms": 1000,
    "kv_transfer_ms": 2.5,
    "decode_queue_ms": 6,
}
LOSS = {
    "choice": 0,
    "at_ms": 300.0,
    "instances": ["decode-0"],
    "cause": "the instance was lost",
    "num_tokens": 3,
}


def lines(process: str, *entries: Mapping[str, object]) -> list[LogLine]:
    stamp = {"timestamp": "2026-11-21T12:00:01.000000Z", "level": "warning"}
    return list(of_process(process, [json.dumps(stamp | dict(entry)) for entry in entries]))


def test_the_stages_of_a_request_that_went_well_are_told_from_one_line() -> None:
    rows = list(as_rows(story(lines("gateway-0", FINISHED))))
    assert rows == [
        ("12:00:00.000", "+0.0 ms", "gateway-0", "accepted: chat of m, 37 prompt tokens"),
        ("12:00:00.001", "+1.5 ms", "gateway-0", "planned"),
        ("12:00:00.004", "+4.0 ms", "gateway-0", "prefill-0 took it"),
        (
            "12:00:00.100",
            "+100.0 ms",
            "gateway-0",
            "first token; 16 tokens of the prompt came from a cache",
        ),
        (
            "12:00:00.106",
            "+106.0 ms",
            "gateway-0",
            "decode-1 has the KV; it waited 6.0 ms, the KV took 2.5 ms",
        ),
        (
            "12:00:01.000",
            "+1000.0 ms",
            "gateway-0",
            "completed: 8 tokens, the last ones from decode-1",
        ),
    ]


def test_losses_and_the_lines_of_instances_stand_where_they_happened() -> None:
    told = story(
        [
            *lines("decode-0", {"event": "leg.failed", "request_id": ID, "reason": "PEER_LOST"}),
            *lines("gateway-0", FINISHED | {"losses": [LOSS]}),
        ]
    )
    whats = [step.what for step in told]
    assert whats[-3] == "lost decode-0 after 3 tokens: the instance was lost"
    assert "leg.failed reason=PEER_LOST" in whats
    assert "a decode has the KV; it waited 6.0 ms, the KV took 2.5 ms" in whats
    entry: Mapping[str, object] = FINISHED | {"losses": [LOSS | {"instances": []}]}
    nobody = [step.what for step in story(lines("gateway-0", entry))]
    assert "lost no instance after 3 tokens: the instance was lost" in nobody


def test_a_failure_tells_its_reason_and_a_request_without_a_token_has_no_such_step() -> None:
    failed = {
        "event": "request.finished",
        "request_id": ID,
        "outcome": "failed",
        "reason": "OVERLOADED",
        "e2e_ms": 5,
    }
    whats = [step.what for step in story(lines("gateway-0", failed))]
    assert whats == ["accepted: call of ?, 0 prompt tokens", "failed: 0 tokens (OVERLOADED)"]


def test_lines_are_found_by_any_id_that_a_client_sees() -> None:
    entries: list[Mapping[str, object]] = [
        FINISHED,
        {"event": "x", "request_id": f"{ID}-1"},
        {"event": "y"},
        {"event": "z", "request_id": "req-other"},
    ]
    found = lines("gateway-0", *entries)
    for asked in (ID, f"chatcmpl-{KEY}", f"resp_{KEY}", KEY):
        assert len(lines_about(asked, found)) == 2
    assert len(lines_about("req-other", found)) == 1


def test_a_story_is_bounded_whatever_the_logs_hold() -> None:
    odd = FINISHED | {"e2e_ms": "soon", "losses": [{}], "timestamp": "yesterday"}
    assert story(lines("gateway-0", odd))
    failed: Mapping[str, object] = {"event": "leg.failed", "request_id": ID}
    many = lines("decode-0", *[failed] * (2 * MAX_STEPS))
    assert len(story(many)) == MAX_STEPS
