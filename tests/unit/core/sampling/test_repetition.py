"""An answer that repeats itself ends at the same token as in vLLM."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from pdmesh.core.sampling.repetition import (
    MAX_COUNT,
    MAX_PATTERN,
    RepeatedEnd,
    RepetitionFinder,
    RepetitionRule,
    repetition_rule,
)
from pdmesh.errors import InvalidRequest


def repeats(tokens: Sequence[int], rule: RepetitionRule) -> bool:
    """The result of vLLM's `check_sequence_repetition`, found by a simpler algorithm."""
    for size in range(max(1, rule.min_size), rule.max_size + 1):
        tail = list(tokens[-size * rule.min_count :])
        if len(tail) == size * rule.min_count and tail == tail[-size:] * rule.min_count:
            return True
    return False


@pytest.mark.parametrize("rule", [(1, 0, 2), (5, 0, 3), (6, 3, 2), (8, 8, 2), (4, 2, 5)])
def test_judging_token_by_token_finds_what_judging_the_whole_answer_finds(
    rule: tuple[int, int, int],
) -> None:
    rng, asked = random.Random(str(rule)), RepetitionRule(*rule)
    num_found = 0
    for _ in range(100):
        finder, tokens = RepetitionFinder(asked), list[int]()
        pattern = rng.choices(range(3), k=rng.randrange(1, 10))
        while len(tokens) < 60:
            tokens.append(
                pattern[len(tokens) % len(pattern)] if rng.random() < 0.95 else rng.randrange(3)
            )
            found = finder.feed(tokens[-1])
            assert found == repeats(tokens, asked)
            num_found += found
    assert num_found > 0


def test_only_as_many_tokens_are_remembered_as_the_longest_pattern_needs() -> None:
    finder = RepetitionFinder(RepetitionRule(MAX_PATTERN, 0, MAX_COUNT))
    for token in range(10_000):
        finder.feed(token % 1000)
    assert len(finder._places) == MAX_PATTERN
    for _ in range(1000):
        assert not finder.feed(7)
    assert len(finder._runs) == MAX_PATTERN


def ended(tokens: Sequence[int], min_tokens: int = 0, max_tokens: int = 100) -> int | None:
    """The number of tokens after which the answer ends, or None. Token 9 ends the answer, too."""
    rule = RepetitionRule(1, 0, 3)
    end = RepeatedEnd(rule, frozenset({9}), min_tokens, max_tokens)
    taken = [*end.feed(tokens[:2]), *end.feed(tokens[2:]), *end.feed([])]
    assert taken == list(tokens[: len(taken)])
    return len(taken) if end.is_found else None


def test_an_answer_ends_with_its_first_repetition_unless_something_else_ends_it_there() -> None:
    assert ended([1, 2, 5, 5, 5, 5]) == 5
    assert ended([1, 2, 5, 5]) is None
    assert ended([5, 5, 5, 5, 5], min_tokens=4) == 4
    assert ended([5, 5, 5], max_tokens=3) is None
    assert ended([1, 9, 9, 9]) is None


@pytest.mark.parametrize(
    ("rule", "name"),
    [
        ((0, 0, 2), "max_pattern_size"),
        ((MAX_PATTERN + 1, 0, 2), "max_pattern_size"),
        ((4, 5, 2), "min_pattern_size"),
        ((4, -1, 2), "min_pattern_size"),
        ((4, 0, 1), "min_count"),
        ((4, 0, MAX_COUNT + 1), "min_count"),
    ],
)
def test_a_rule_that_could_find_nothing_is_refused(rule: tuple[int, int, int], name: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        RepetitionRule(*rule).check()
    assert refused.value.field == f"repetition_detection.{name}"


@pytest.mark.parametrize("min_count", [-1, MAX_COUNT + 1])
def test_an_invalid_count_is_refused_even_without_a_pattern(min_count: int) -> None:
    with pytest.raises(InvalidRequest) as refused:
        repetition_rule(0, 0, min_count)
    assert refused.value.field == "repetition_detection.min_count"
    assert repetition_rule(0, 0, 0) is repetition_rule(0, 0, MAX_COUNT) is None
