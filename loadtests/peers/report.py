"""Writes the record: each stack's numbers, ratios of ours to theirs, and whether the bars are
met.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from loadtests.harness.results import Spread
from loadtests.peers.cases import EIGHT, MEASURES, Measure, Turn
from loadtests.peers.stacks import DYNAMO_PD, OURS, OURS_8, PASSTHROUGH

Rounds = Sequence[Sequence[Turn]]

_PASSTHROUGH_BAR: Final = 0.6
_SLOTS_BAR: Final = 0.9

ABOUT: Final = (
    "Engines compute nothing. Ours runs as two gateways, a prefill and a decode on sim, and moves "
    "the KV's bytes. Dynamo 1.6.1 has its KV router and a mocker of each role, sglang-router 0.3.2 "
    "two workers of each role in C, and the passthrough one worker in C; none of them moves KV. "
    "Stacks take turns on the same cores as the generator. Each cell: the median of the rounds "
    "(lowest..highest)."
)


def values(rounds: Rounds, stack: str, measure: Measure) -> list[float]:
    """One number for each round in which the stack took part."""
    return [
        measure.read(turn)
        for turns in rounds
        for turn in turns
        if (turn.stack, turn.case) == (stack, measure.case.name)
    ]


def ratios(rounds: Rounds, ours: str, theirs: str, measure: Measure) -> list[float]:
    """Our number divided by theirs, for each round that has both."""
    found = []
    for turns in rounds:
        pair = [values([turns], stack, measure) for stack in (ours, theirs)]
        if all(pair) and pair[1][0]:
            found.append(pair[0][0] / pair[1][0])
    return found


def stacks_of(rounds: Rounds) -> list[str]:
    """The stacks, in the order of the first round."""
    return list(dict.fromkeys(turn.stack for turns in rounds for turn in turns))


def as_markdown(rounds: Rounds, missing: Mapping[str, str]) -> str:
    stacks = stacks_of(rounds)
    others = [stack for stack in stacks if stack != OURS]
    has_ratios = OURS in stacks and others
    parts = [
        _table("", stacks, lambda stack, m: (values(rounds, stack, m), m.form)),
        "Ours relative to theirs, in the same round:" if has_ratios else "",
        _table(
            f"{OURS} / ",
            others if has_ratios else (),
            lambda stack, m: (ratios(rounds, OURS, stack, m), ".2f"),
        ),
        "\n".join(bars(rounds)),
        *(f"**Missing**: {why}" for why in missing.values()),
        failures(rounds),
    ]
    return "\n\n".join(part for part in parts if part)


def _table(
    prefix: str,
    stacks: Sequence[str],
    cell: Callable[[str, Measure], tuple[Sequence[float], str]],
) -> str:
    """A table with a row for each measure.

    `cell` returns a stack's numbers and their format.
    """
    if not stacks:
        return ""
    lines = [
        f"| | {' | '.join(prefix + stack for stack in stacks)} |",
        "|" + "---|" * (1 + len(stacks)),
    ]
    for measure in MEASURES:
        cells = []
        for stack in stacks:
            found, form = cell(stack, measure)
            cells.append(Spread.of(found).text(form) if found else "")
        lines.append(f"| {measure.name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def bars(rounds: Rounds) -> Iterator[str]:
    """A line for each bar whose two stacks were measured."""
    for measure in MEASURES:
        if measure.bar is not None:
            yield from _bar(rounds, OURS, DYNAMO_PD, measure, measure.bar)
    for measure in MEASURES[:3]:
        yield from _bar(rounds, OURS, PASSTHROUGH, measure, _PASSTHROUGH_BAR)
    eight = next(m for m in MEASURES if m.case == EIGHT)
    yield from _bar(rounds, OURS_8, OURS, eight, _SLOTS_BAR)


def _bar(rounds: Rounds, ours: str, theirs: str, measure: Measure, bar: float) -> Iterator[str]:
    if found := ratios(rounds, ours, theirs, measure):
        median = statistics.median(found)
        is_met = median >= bar if measure.is_more_better else median <= bar
        sign = ">=" if measure.is_more_better else "<="
        yield (
            f"- {measure.name}: {ours} / {theirs} {median:.2f}, bar {sign} {bar:.1f}: "
            f"{'met' if is_met else '**not met**'}"
        )


def failures(rounds: Rounds) -> str:
    found = [
        f"{turn.stack}, {turn.case}: {turn.load.num_failed}"
        for turns in rounds
        for turn in turns
        if turn.load.num_failed
    ]
    return f"Requests that failed: {'; '.join(found)}." if found else "No request failed."
