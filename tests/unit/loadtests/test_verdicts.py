"""The sentences that say which policy is best at which measure."""

from __future__ import annotations

from loadtests.harness.verdicts import Measure, verdicts

HIT: Measure[float] = Measure("hit, %", lambda run: run, ".1f", is_more_better=True)
TTFT: Measure[float] = Measure("TTFT, ms", lambda run: run, ".0f")
RUNS = {"default": [9.0, 10.0, 11.0], "a": [7.0, 8.0, 9.5], "b": [1.0, 2.0, 3.0]}


def test_the_rival_is_the_best_of_the_others() -> None:
    assert verdicts(RUNS, [HIT]) == "- hit, %: ours is best, 10.0 against 8.0 of `a`."


def test_a_policy_that_is_not_best_shows_its_margin_and_known_causes() -> None:
    text = verdicts(RUNS, [TTFT], lambda measure, rival: f" {measure.name} of {rival}!")
    assert text == (
        "- TTFT, ms: **not best**, 10 against 2 of `b`, beyond the spread of the seeds. TTFT, ms "
        "of b!"
    )
    close = {"default": [9.0, 10.0, 11.0], "a": [7.0, 9.4, 9.5]}
    assert "within the spread" in verdicts(close, [TTFT])


def test_one_seed_has_no_spread() -> None:
    assert "2 of `a`, with one seed." in verdicts({"default": [9.0], "a": [2.0]}, [TTFT])


def test_values_that_print_alike_count_as_equal() -> None:
    assert "equal" in verdicts({"default": [10.01], "a": [10.02]}, [HIT])


def test_without_rivals_there_is_nothing_to_beat() -> None:
    assert verdicts({"default": [1.0]}, [HIT]) == ""
    assert verdicts({"a": [1.0], "b": [2.0]}, [HIT]) == ""
