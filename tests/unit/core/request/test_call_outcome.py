"""The outcome of a call with several choices."""

from __future__ import annotations

import pytest

from pdmesh.core.request.call_outcome import EndedChoice, call_outcome
from pdmesh.core.request.events import Cancelled, Complete, Fail
from pdmesh.errors import Draining, NoInstance

LONG, GONE = EndedChoice(Complete("length")), EndedChoice(Cancelled())
STOPPED = EndedChoice(Cancelled(), is_stopped=True)
FAILED = EndedChoice(Fail(NoInstance("none")))
ENDED = EndedChoice(Cancelled(), error=Draining("the gateway stops"))


@pytest.mark.parametrize(
    ("choices", "outcome", "reason"),
    [
        ([LONG], "completed", "length"),
        ([STOPPED], "completed", "stop"),
        ([LONG, STOPPED], "completed", "length"),
        ([STOPPED, LONG], "completed", "stop"),
        ([LONG, GONE], "cancelled", "CLIENT_GONE"),
        ([EndedChoice(None)], "cancelled", "CLIENT_GONE"),
        ([LONG, GONE, FAILED], "failed", NoInstance.default_reason),
        ([ENDED, FAILED], "failed", NoInstance.default_reason),
        ([LONG, ENDED], "failed", Draining.default_reason),
    ],
)
def test_one_failure_is_enough_and_a_stop_string_is_an_answer(
    choices: list[EndedChoice], outcome: str, reason: str
) -> None:
    assert call_outcome(choices) == (outcome, reason)


def test_a_choice_is_answered_by_its_end_or_a_stop() -> None:
    assert [c.is_answered for c in (LONG, STOPPED, GONE, FAILED)] == [True, True, False, False]
