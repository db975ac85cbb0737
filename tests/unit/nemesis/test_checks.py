"""The nemesis tests' own checks: the violations that they must find, and what they must accept.

The nemesis injects random faults into a mesh under load.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.chaos.nemesis.actions import Fault, Freeze, Signal
from tests.chaos.nemesis.invariants import Books, judge_requests, scan_logs
from tests.chaos.nemesis.plan import Step
from tests.support.attack.steady_clients import Asked
from tests.support.sites.fleet import Reference
from tests.support.streams import StreamOutcome

PROMPT, NUM_TOKENS = [50, 51, 52], 8
INSTANCE, GATEWAY = Signal("instance-0", "SIGKILL"), Signal("gateway-0", "SIGTERM")
REFUSED = {"message": "nobody there", "code": "no_instance"}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference.load(tmp_path_factory.mktemp("sim-model"))


def ended(text: str, *, after_s: float = 1.0, **how: object) -> Asked:
    """A request that began at time 0 and got its whole text at `after_s`."""
    outcome = StreamOutcome(PROMPT, 0.0, text, arrivals=[after_s], ended_at=after_s)
    for name, value in ({"is_done": True, "finish_reason": "length"} | how).items():
        setattr(outcome, name, value)
    return Asked(PROMPT, NUM_TOKENS, outcome)


def judged(asked: Asked, reference: Reference, *faults: Fault, num_lost: int = 1) -> list[str]:
    step = Step(1, tuple((0.0, fault) for fault in faults or (INSTANCE,)))
    return [v.invariant for v in judge_requests([asked], step, num_lost, reference)]


def test_the_right_text_in_time_is_no_violation(reference: Reference) -> None:
    assert judged(ended(reference.text(PROMPT, NUM_TOKENS)), reference) == []


def test_wrong_text_and_long_silence_are_violations(reference: Reference) -> None:
    right = reference.text(PROMPT, NUM_TOKENS)
    assert judged(ended(right[:-1]), reference) == ["I2"]
    assert judged(ended(right + right[-1]), reference) == ["I2"]
    assert judged(ended(right, after_s=6.1), reference) == ["I1"]
    assert judged(ended(right, after_s=6.1), reference, Freeze("gateway-1", 3.0)) == []
    assert judged(ended(right, after_s=6.1), reference, num_lost=2) == []
    assert judged(Asked(PROMPT, NUM_TOKENS, None), reference) == ["I1"]
    assert judged(Asked(PROMPT, NUM_TOKENS, None, gave_up=True), reference) == []


def test_an_error_counts_only_if_no_instance_could_take_over(reference: Reference) -> None:
    refused = ended("", is_done=False, finish_reason=None, error=REFUSED)
    assert judged(refused, reference) == ["I1"]
    assert judged(refused, reference, num_lost=2) == []
    assert judged(refused, reference, GATEWAY) == []
    bug = {"message": "oh", "code": "internal"}
    internal = ended("", is_done=False, finish_reason=None, error=bug)
    assert judged(internal, reference, num_lost=2) == ["I1"]


def test_only_the_death_of_a_gateway_may_cut_a_connection_and_only_after_right_text(
    reference: Reference,
) -> None:
    right = reference.text(PROMPT, NUM_TOKENS)
    cut: dict[str, Any] = {"is_done": False, "finish_reason": None, "was_cut": True}
    assert judged(ended(right[:2], **cut), reference) == ["I1"]
    assert judged(ended(right[:2], **cut), reference, GATEWAY) == []
    assert judged(ended("?" + right[:2], **cut), reference, GATEWAY) == ["I2"]


def test_logs_are_scanned_once_for_secrets_and_bugs(tmp_path: Path) -> None:
    log, books = tmp_path / "gateway-0.log", Books()
    log.write_text('{"event":"request.finished"}\n')
    assert scan_logs(tmp_path, books, ["sk-1"]) == []
    with log.open("a") as file:
        file.write('{"event":"oops","key":"sk-1"}\n{"event":"rpc.bug"}\n{"event":"engine.died"}\n')
    assert [v.invariant for v in scan_logs(tmp_path, books, ["sk-1"])] == ["I9", "I1"]
    assert scan_logs(tmp_path, books, ["sk-1"]) == []
