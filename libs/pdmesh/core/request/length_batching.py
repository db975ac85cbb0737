"""Decides which waiting prompts form one batch: those of similar length (S90), in a window (S91).

It is for engines that compute the prompts of a batch in lockstep, each for as long as the longest
takes: with padding, or as ranks of a domain that exchange data in every layer.

For each batch the window is w = max(DP size, |R|), where R are the waiting prompts. A short queue
is one batch; from a long queue, the batch that wastes least goes first. No prompt is passed over
forever: after `max_passed` batches that had a prompt from behind it, it goes before all others. So
it begins at most `max_passed` batches later than in the order of the queue.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

MAX_PASSED: Final = 8
MAX_WINDOW: Final = 256  # bounds what one choice costs


@dataclass(frozen=True, slots=True)
class Place:
    """A prompt that waits. `number` is unique; an engine has to compute `num_tokens` for it."""

    number: int
    num_tokens: int


def window_size(dp_size: int, queue_depth: int) -> int:
    return max(dp_size, queue_depth)


def padding_waste(lengths: Sequence[int]) -> float:
    """Tokens computed for nothing, per token asked for: (longest * n - sum) / sum."""
    total = sum(lengths)
    return (max(lengths) * len(lengths) - total) / total if total else 0.0


@dataclass(slots=True)
class LengthWindow:
    """One window for all queues. A batch from one queue passes over no prompt of another.

    The caller calls `forget` for a prompt that leaves.
    """

    dp_size: int  # prompts of one batch
    max_passed: int = MAX_PASSED
    _passed: dict[int, int] = field(default_factory=dict)  # by number: batches that went before it

    def take(self, queue: Sequence[Place]) -> list[int]:
        """Numbers of the next batch. `queue` is in the order in which prompts would go singly."""
        window = queue[: min(MAX_WINDOW, window_size(self.dp_size, len(queue)))]
        if len(window) <= self.dp_size:
            batch = list(window)
        else:
            batch = self._overdue(window) or _most_alike(window, self.dp_size)
        self._count_passed(window, {place.number for place in batch})
        return [place.number for place in batch]

    def forget(self, number: int) -> None:
        """The prompt no longer waits."""
        self._passed.pop(number, None)

    def known(self) -> set[int]:
        """Numbers of the prompts that were passed over and not forgotten since."""
        return set(self._passed)

    def _overdue(self, window: Sequence[Place]) -> list[Place]:
        """Prompts that may not be passed over again, filled up with the most similar of the rest.

        Empty if there is no such prompt.
        """
        overdue = [p for p in window if self._passed.get(p.number, 0) >= self.max_passed]
        if not overdue:
            return []
        first = overdue[0]
        rest = [p for p in window if p not in overdue]
        rest.sort(key=lambda p: abs(p.num_tokens - first.num_tokens))
        return [*overdue, *rest][: self.dp_size]

    def _count_passed(self, window: Sequence[Place], gone: set[int]) -> None:
        last = max(index for index, place in enumerate(window) if place.number in gone)
        for index, place in enumerate(window):
            if place.number in gone:
                self.forget(place.number)
            elif index < last:
                self._passed[place.number] = self._passed.get(place.number, 0) + 1


def _most_alike(window: Iterable[Place], count: int) -> list[Place]:
    """The `count` neighbours by length that waste least.

    If several are equal, the shortest, since they end first.
    """
    ordered = sorted(window, key=lambda place: place.num_tokens)
    groups = (ordered[i : i + count] for i in range(len(ordered) - count + 1))
    return min(groups, key=lambda group: padding_waste([place.num_tokens for place in group]))
