"""The report of `make bench NAME=steps`."""

from __future__ import annotations

from loadtests.engine.steps import COUNTED, Measure, as_markdown


def measure(mode: str, gap_s: float, wall_s: float) -> Measure:
    steps = dict.fromkeys(COUNTED, 0.0) | {
        "num_steps": 10.0,
        "num_steady": 8.0,
        "num_overlapped": 8.0 if mode == "async" else 0.0,
        "gap_s": gap_s,
        "schedule_s": 0.02,
    }
    return Measure("decode", mode, 8, wall_s, 100, [0.01, 0.02, 0.03], steps)


def test_an_async_turn_is_compared_with_the_sync_turn_of_its_round() -> None:
    text = as_markdown([measure("sync", 0.08, 2.0), measure("async", 0.008, 1.0)])
    assert "| 8 | 10.00, 1.00 ms | 0.10 (0.10-0.10) |" in text
    assert "| 50.00, 100.00 | 2.00 (2.00-2.00) |" in text
    assert "| 20.00, 20.00 ms |" in text
    assert "100.0 % of 8" in text
    assert "| sync, 8 | 2.00 | 0.00 | 0.00 |" in text
