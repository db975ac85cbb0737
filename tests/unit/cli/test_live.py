"""The view of `pdmesh top`, made from the events of the last seconds."""

from __future__ import annotations

from pdmesh.cli.view.live import WINDOW_S, LiveView
from pdmesh.events.v1.events_pb2 import Header, InstanceLoad, RequestFinished
from pdmesh.v1.common_pb2 import Usage


def finished(ttft_ms: float, outcome: str = "completed", num_tokens: int = 11) -> RequestFinished:
    return RequestFinished(
        scenario="chat",
        outcome=outcome,
        ttft_ms=ttft_ms,
        e2e_ms=ttft_ms + 200,
        queue_ms=1,
        num_migrations=1,
        usage=Usage(num_completion_tokens=num_tokens),
    )


def load(used: int, *, is_draining: bool = False) -> InstanceLoad:
    computed = [InstanceLoad.Computed(num_tokens=400, num_cached_tokens=100)]
    return InstanceLoad(
        header=Header(publisher_id="prefill-0"),
        num_slots=8,
        num_slots_used=used,
        num_kv_blocks_free=77,
        computed=computed,
        is_draining=is_draining,
    )


def rows(view: LiveView, now: float) -> dict[str, list[str]]:
    words = [line.split() for line in view.text(now).splitlines()]
    return {each[0]: each[1:] for each in words if each}


def test_requests_of_the_last_seconds_are_counted_by_scenario() -> None:
    view = LiveView(began=0)
    view.on_finished(finished(9999), 1)  # older than the view's window
    for at in range(12, 17):
        view.on_finished(finished(50), at)
    view.on_finished(finished(0, "failed", 0), 17)
    shown = " ".join(rows(view, 1 + WINDOW_S + 8)["chat"])
    # 6 requests and 55 tokens in 10 s
    assert shown == "0.6 6 1 50 ms 50 ms 20 ms 1.0 ms 6"
    assert "chat" not in rows(view, 100)


def test_a_mesh_that_was_just_looked_at_is_not_shown_ten_times_too_slow() -> None:
    view = LiveView(began=100)
    view.on_finished(finished(50), 101)
    assert rows(view, 102)["chat"][0] == "0.5"


def test_an_instance_is_shown_with_its_latest_load() -> None:
    view = LiveView(began=0)
    view.on_load(load(1), 9)
    view.on_load(load(3), 10)
    assert rows(view, 10)["prefill-0"] == ["3/8", "77", "80", "25%"]
    view.on_load(load(3, is_draining=True), 11)
    assert rows(view, 11)["prefill-0"][-1] == "draining"


def test_an_instance_that_reports_nothing_is_called_silent() -> None:
    view = LiveView(began=0)
    view.on_load(load(1), 9)
    assert " ".join(rows(view, 59)["prefill-0"]) == "1/8 77 0 - silent for 50 s"
