"""The history of the last hour is summed once per step, however many pages ask for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from pdmesh.core.history.ended_request import EndedRequest
from pdmesh.core.history.scenario_history import STEP_S, AnswerHistory
from pdmesh.services.master_scheduler.overview.overview import Overview


def test_callers_within_a_step_get_one_answer_and_later_ones_the_next_step() -> None:
    answers, now = AnswerHistory(), [10 * STEP_S]
    feed: Any = SimpleNamespace(books=SimpleNamespace(answers=answers))
    nothing: Any = None
    overview = Overview(feed, nothing, nothing, lambda: now[0], lambda: 1e9)
    answers.handle(EndedRequest("r-1", "chat", "completed"), now[0])
    now[0] += 0.5
    first = overview.history()
    assert not sum(first.scenarios[0].num_answered)  # the present step is left out
    now[0] = 11 * STEP_S - 0.001
    assert overview.history() is first
    now[0] = 11 * STEP_S
    (chat,) = overview.history().scenarios
    assert (chat.scenario, chat.num_answered[-1]) == ("chat", 1)
