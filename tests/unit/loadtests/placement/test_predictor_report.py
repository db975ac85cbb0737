"""The bench of the predictor. Each report is compared with the prediction before the predictor
learns from the report.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from loadtests.placement.predictor import SITES, Site, traces
from loadtests.placement.predictor_report import Ended, Reported, Round, judged, noise_floor, report

SITE = "prefill"


def reported(
    trace: str, *computed: tuple[int, int, float, int, float], name: str = "prefill-0"
) -> Reported:
    return Reported(SITE, trace, name, 0.0, 0, computed)


def test_a_span_is_judged_by_what_was_reported_before_it() -> None:
    rng = random.Random(1)
    lengths = [rng.randrange(100, 2000) for _ in range(300)]
    spans = judged([reported("learn", (n, 0, 0.01 + 2e-4 * n, 1, 0.0)) for n in lengths])
    assert spans[0].error > 0.2, "nothing was learnt yet"
    assert max(s.error for s in spans[150:]) < 0.02
    assert spans[-1].rate_error > 0.02, "a mean rate knows no fixed part"
    slow = judged([reported("learn", (n, 0, 0.01 + 2e-4 * n, 1, 0.0)) for n in lengths[:1]])
    assert slow[0].predicted_s == spans[0].predicted_s


def test_prompts_are_gathered_over_reports_until_their_time_is_told() -> None:
    spans = judged(
        [
            reported("chats", (100, 0, 0.0, 1, 0.0)),
            reported("chats", (200, 64, 0.5, 2, 1.5), (300, 0, 0.25, 1, 0.0)),
        ]
    )
    assert [(s.num_computed, s.seconds, s.num_beside) for s in spans] == [
        (236, 0.5, 1.5),
        (300, 0.25, 0.0),
    ]


def test_the_floor_is_the_median_of_the_other_prompts_of_the_same_tokens() -> None:
    spans = judged(
        [reported("repeats", (100, 0, seconds, 1, 0.0)) for seconds in (1.0, 1.0, 1.0, 2.0)]
        + [reported("repeats", (200, 0, 1.0, 1, 0.0))]
    )
    assert [error for _, error in noise_floor(spans)] == pytest.approx([0, 0, 0, 0.5])


def test_the_report_leaves_out_what_was_learnt_from_and_what_was_not_expected() -> None:
    learnt = Ended(SITE, "learn", "completed", 100, 0, 0, 0.1, 1.1, 0.5)
    judged_one = Ended(SITE, "chats", "completed", 100, 50, 0, 0.1, 1.1, 0.9)
    unknown = Ended(SITE, "chats", "completed", 100, 50, 0, 0.1, 1.1, 0.0)
    refused = Ended(SITE, "chats", "completed", 100, 50, 2, 0.1, 9.1, 0.9)
    spans = [reported(name, (100, 0, 1.0, 1, 0.0)) for name in ("learn", "chats")]
    text = report([Round(spans, [learnt, judged_one, unknown, refused])])
    assert "| prefill | chats | 1 | 1000 | 10.0 | 10.0 | 50.0 |" in text
    assert "| prefill | **all judged** | 1 | 1000 | 10.0 |" in text


@pytest.mark.parametrize("site", SITES, ids=lambda s: s.name)
def test_judged_traces_share_nothing_with_what_is_learnt_from(site: Site) -> None:
    played = list(traces(site, Path("/none"), seed=1, count=40))
    assert [t.name for t in played][:2] == ["learn", "repeats"]
    names = [{b for a in t.arrivals for b in a.blocks} for t in played]
    assert all(names[0].isdisjoint(other) for other in names[1:]), "no block was seen before"
    for trace in played:
        assert [a.at_s for a in trace.arrivals] == sorted(a.at_s for a in trace.arrivals)
        assert all(a.num_prompt_tokens >= 64 * len(a.blocks) for a in trace.arrivals)
