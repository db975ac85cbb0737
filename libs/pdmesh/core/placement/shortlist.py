"""Decides which instances are scored for one query, if there are too many to score all of them.

The cost of a decision must not grow with the mesh. So only a shortlist is scored: the instances
with the longest cached prefixes of the prompt, those that served the chat's last turn, and a random
sample of all. The least busy instance of a sample is hardly busier than the least busy of all.
Because samples differ, successive requests do not all choose the same instance (the power of d
choices; Mitzenmacher 2001).
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

_HOLDERS: Final = 0.25  # the share of places for the instances with the longest cached prefixes
_TRIES: Final = 1024  # the most holders to check; many may be decodes, or in other groups
_WIDER: Final = 4  # the factor by which the sample grows if no listed instance has a free slot
_HEARD: Final = 24  # `TypicalWork.hear` uses at least this many of a decision's random instances
_HEARD_WEIGHT: Final = 0.05


@dataclass(frozen=True, slots=True)
class Shortlist:
    """The instances to score.

    `drawn` has the random sample among them, which represents all instances. `drawn` is empty if
    all instances are listed.
    """

    instances: list[Instance]
    drawn: Sequence[Instance] = ()


@dataclass(slots=True)
class TypicalWork:
    """The mean work of an instance, recent and waiting, from the samples of many decisions.

    Waiting work is the backlog. All times are in seconds. The mean of one shortlist would be too
    high, because holders of a popular prefix are busier.
    """

    used_s: float = 0.0  # seconds of compute, as in `RecentWork`
    balance_s: float = 0.0
    backlog_s: float = 0.0
    num_heard: int = 0

    def hear(self, drawn: Sequence[Instance], now: float) -> None:
        """Learn from `drawn`, the random sample of one decision."""
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
    """Choose about `most` instances of all `parts`.

    If none of them can serve, four times as many are sampled and added. If none of these can serve
    either, all instances are checked, and up to `most` that can serve are added.

    `matches` has the number of held blocks by instance id, in ascending order, as
    `PrefixIndex.match` returns them. `find` returns the instance with an id, if it is in one of the
    parts. The instances of `kept` are always included, if `find` finds them.
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
    """The instances with the longest matches. Equal matches are in random order."""
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
    """The numbers of the range in random order.

    The cost depends only on how many of them are taken.
    """
    moved: dict[int, int] = {}
    for at in range(first, end):
        other = at + int(rng.random() * (end - at))
        yield moved.pop(other, other)
        if other != at:
            moved[other] = moved.pop(at, at)


def sampled(parts: Sequence[Sequence[T]], count: int, rng: random.Random) -> Iterator[T]:
    """A uniform random sample of `count` elements of all parts, in the order of the parts.

    If there are fewer than `count` elements, all of them are in the sample.
    """
    ends = list(accumulate(map(len, parts)))
    part = first = 0
    for number in _drawn(ends[-1] if ends else 0, count, rng):
        while number >= ends[part]:
            first = ends[part]
            part += 1
        yield parts[part][number - first]


def _drawn(total: int, count: int, rng: random.Random) -> Sequence[int]:
    """`count` different random numbers below `total`, ascending."""
    if 2 * count >= total:
        return sorted(rng.sample(range(total), min(count, total)))
    draw = rng.random
    numbers = {int(draw() * total) for _ in range(count)}
    while len(numbers) < count:
        numbers.add(int(draw() * total))
    return sorted(numbers)
