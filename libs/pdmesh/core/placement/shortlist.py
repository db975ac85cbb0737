"""Decides which instances are scored for one query, where there are too many to score all of them.

A decision must not cost more in a larger mesh. So at most `most` instances are scored: those that
hold most of the prompt, those that served the chat's last turn, and a random sample of the others.
Among `d` random ones, the least busy is nearly the least busy of all, and gateways or decisions
that follow each other do not all choose the same one (the power of d choices; Mitzenmacher 2001).
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Final, TypeVar

from pdmesh.core.placement.instance import Instance

T = TypeVar("T")

_HOLDERS: Final = 0.25  # of the places, for instances that hold most of the prompt
_TRIES: Final = 1024  # holders looked at, as most may be decodes, or of other groups
_WIDER: Final = 4  # times as many are sampled if no listed instance has a free slot
_HEARD: Final = 24  # at least so many random instances of a decision count
_HEARD_WEIGHT: Final = 0.05


@dataclass(frozen=True, slots=True)
class Shortlist:
    """`drawn`: the random ones among `instances`, which stand for all; empty: all are listed."""

    instances: list[Instance]
    drawn: Sequence[Instance] = ()


@dataclass(slots=True)
class TypicalWork:
    """Recent work and backlog of the mean instance, in seconds, from samples of many decisions.

    A shortlist is no measure of all instances: the holders of a popular prefix are busier.
    """

    used_s: float = 0.0  # of compute, as in `RecentWork`
    balance_s: float = 0.0
    backlog_s: float = 0.0
    num_heard: int = 0

    def hear(self, drawn: Sequence[Instance], now: float) -> None:
        """`drawn`: instances of one decision, each with equal probability."""
        some = drawn[:: max(1, len(drawn) // _HEARD)]
        self.num_heard += 1
        weight = max(_HEARD_WEIGHT, 1 / self.num_heard) / len(some)
        recent = [i.recent.at(now) for i in some]
        self.used_s += weight * sum(used - self.used_s for used, _ in recent)
        self.balance_s += weight * sum(balance - self.balance_s for _, balance in recent)
        self.backlog_s += weight * sum(i.backlog_s - self.backlog_s for i in some)


def shortlist(
    parts: Sequence[Sequence[Instance]],
    most: int,
    rng: random.Random,
    matches: Mapping[str, int],
    find: Callable[[str], Instance | None],
    kept: Sequence[str] = (),
    can_serve: Callable[[Instance], bool] = lambda i: i.used_slots() < i.num_slots,
) -> Shortlist:
    """At most `most` instances of all `parts`, or more if none of these can serve.

    Then four times as many are sampled; if none of these can serve either, all are looked at.

    `matches`: blocks by instance, in ascending order, as `PrefixIndex.match` gives them. `find`:
    the instance of this name, if it is in one of the parts. `kept` are among the result if found.
    """
    if sum(map(len, parts)) <= most:
        return Shortlist([instance for part in parts for instance in part])
    chosen: dict[str, Instance] = {}
    for name in kept:
        if (instance := find(name)) is not None:
            chosen[name] = instance
    for instance in _holders(matches, max(1, int(most * _HOLDERS)), rng, find):
        chosen[instance.id] = instance
    drawn = list(sampled(parts, max(1, most - len(chosen)), rng))
    for instance in drawn:
        chosen[instance.id] = instance
    if not any(map(can_serve, chosen.values())):
        for instance in sampled(parts, _WIDER * most, rng):
            chosen[instance.id] = instance
        if not any(map(can_serve, chosen.values())):
            able = [instance for part in parts for instance in part if can_serve(instance)]
            for instance in rng.sample(able, min(most, len(able))):
                chosen[instance.id] = instance
    return Shortlist(list(chosen.values()), drawn)


def _holders(
    matches: Mapping[str, int],
    count: int,
    rng: random.Random,
    find: Callable[[str], Instance | None],
) -> Iterator[Instance]:
    """Instances with the longest matches, in random order where these are equal."""
    names = list(matches)
    end, tries = len(names), _TRIES
    while end and tries > 0:
        first = bisect_left(names, matches[names[end - 1]], 0, end, key=matches.__getitem__)
        for at in islice(_shuffled(first, end, rng), tries):
            tries -= 1
            if (instance := find(names[at])) is not None:
                yield instance
                count -= 1
                if not count:
                    return
        end = first


def _shuffled(first: int, end: int, rng: random.Random) -> Iterator[int]:
    """The numbers of the range in random order; only those that are taken cost time."""
    moved: dict[int, int] = {}
    for at in range(first, end):
        other = at + int(rng.random() * (end - at))
        yield moved.pop(other, other)
        if other != at:
            moved[other] = moved.pop(at, at)


def sampled(parts: Sequence[Sequence[T]], count: int, rng: random.Random) -> Iterator[T]:
    """`count` different elements of all parts, each equally likely; all if there are no more.

    They come in the order of the parts.
    """
    ends = list(accumulate(map(len, parts)))
    part = first = 0
    for number in _drawn(ends[-1] if ends else 0, count, rng):
        while number >= ends[part]:
            first = ends[part]
            part += 1
        yield parts[part][number - first]


def _drawn(total: int, count: int, rng: random.Random) -> Sequence[int]:
    """`count` different numbers below `total`, ascending; this takes few extra draws."""
    if 2 * count >= total:
        return sorted(rng.sample(range(total), min(count, total)))
    draw = rng.random
    numbers = {int(draw() * total) for _ in range(count)}
    while len(numbers) < count:
        numbers.add(int(draw() * total))
    return sorted(numbers)
