"""The latest requests, with the steps that their gateway and instances reported."""

from __future__ import annotations

from pdmesh.core.history.ended_request import EndedRequest, InstanceLoss
from pdmesh.core.history.recent_requests import MAX_REQUESTS, RecentRequests

HEX = "0123456789abcdef01234567"


def test_a_story_has_the_gateways_steps_and_the_instances_errors_by_time() -> None:
    requests = RecentRequests()
    requests.failed_at("d-0", f"req-{HEX}", "KV_TRANSFER_FAILED: slow", 99.95)
    assert [step.what for step in requests.story(HEX)] == ["KV_TRANSFER_FAILED: slow"]
    loss = InstanceLoss(60.0, ("d-0",), "KV transfer failed", 1)
    request = EndedRequest(f"req-{HEX}", "chat", "completed", "g-0", e2e_ms=100, losses=(loss,))
    requests.ended(request, 100.0)
    assert [
        (step.process, step.what.partition(":")[0]) for step in requests.story(f"chatcmpl-{HEX}")
    ] == [
        ("g-0", "accepted"),
        ("d-0", "KV_TRANSFER_FAILED"),
        ("g-0", "lost d-0 after 1 token"),
        ("g-0", "completed"),
    ]
    assert requests.of(f"msg_{HEX}") is request


def test_nothing_is_known_of_another_request_and_the_oldest_is_forgotten() -> None:
    requests = RecentRequests()
    for number in range(MAX_REQUESTS + 1):
        requests.ended(EndedRequest(f"r{number}", "chat", "completed"), float(number))
    assert requests.story("r0") == []
    assert requests.of("r0") is None
    assert requests.story("r1")
