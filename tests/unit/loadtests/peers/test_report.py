"""The report that compares the mesh with peer systems.

Ratios are taken within a round, and their medians are compared with the required values. Without a
peer's measurements, the report claims nothing.
"""

from __future__ import annotations

import pytest

from loadtests.peers.__main__ import order_of
from loadtests.peers.cases import CASES, EIGHT, MEASURES, ONE, Load, Turn
from loadtests.peers.report import as_markdown, bars, ratios
from loadtests.peers.stacks import DYNAMO_PD, OURS, OURS_8, PASSTHROUGH, STACKS

RATE = MEASURES[0]


def turn(stack: str, rate: float, case: str = ONE.name, ttft_ms: float = 1.0) -> Turn:
    load = Load(round(10 * rate), 0, 0, 10.0, 1.0, 2.0, ttft_ms, 2 * ttft_ms)
    return Turn(stack, case, load, cpu_s=rate / 100)


def whole(stack: str, rate: float, ttft_ms: float) -> list[Turn]:
    return [turn(stack, rate, case.name, ttft_ms) for case in CASES]


def test_a_ratio_is_that_of_two_stacks_in_one_round() -> None:
    """In the second round, the machine was four times as slow, for both stacks."""
    rounds = [
        [turn(OURS, 800), turn(DYNAMO_PD, 400)],
        [turn(DYNAMO_PD, 100), turn(OURS, 200)],
        [turn(OURS, 1000)],  # Dynamo has died, so it has no turn
    ]
    assert ratios(rounds, OURS, DYNAMO_PD, RATE) == [2.0, 2.0]


@pytest.mark.parametrize(("rate", "ttft_ms", "is_met"), [(200, 2.0, True), (199, 2.1, False)])
def test_a_bar_is_met_where_more_is_more_and_where_less_is_more(
    rate: float, ttft_ms: float, is_met: bool
) -> None:
    rounds = [[*whole(OURS, rate, ttft_ms), *whole(DYNAMO_PD, 100, 4.0)]]
    lines = [line for line in bars(rounds) if "requests/s" in line or "p50" in line]
    assert len(lines) == 3
    for line in lines:
        assert line.endswith(": met" if is_met else ": **not met**")


def test_each_bar_has_a_line_once_its_stacks_were_measured() -> None:
    rounds = [[t for s in (OURS, OURS_8, DYNAMO_PD, PASSTHROUGH) for t in whole(s, 100, 1.0)]]
    lines = list(bars(rounds))
    with_bar = [measure for measure in MEASURES if measure.bar is not None]
    assert len(lines) == len(with_bar) + 3 + 1
    assert lines[-1].startswith(f"- requests/s, {EIGHT.name}")
    assert OURS_8 in lines[-1]


def test_without_a_peer_nothing_is_claimed() -> None:
    text = as_markdown([whole(OURS, 100, 1.0)], {DYNAMO_PD: "dynamo: no network"})
    assert "relative" not in text
    assert "met" not in text
    assert "**Missing**: dynamo: no network" in text


def test_failed_requests_are_named() -> None:
    failed = Turn(OURS, ONE.name, Load(10, 3, 0, 1.0, 1.0, 1.0, 0.0, 0.0), 0.1)
    assert f"{OURS}, {ONE.name}: 3" in as_markdown([[failed]], {})


def test_rounds_take_the_stacks_in_alternating_order() -> None:
    assert [order_of(STACKS, n)[0].name for n in range(4)] == [
        STACKS[0].name,
        STACKS[-1].name,
    ] * 2
