"""Puts waiting prompts of similar length into one batch (S90, S91).

Sometimes the prompts of a batch are computed in lockstep, so that each takes as long as the longest
one. Either one engine pads them to equal length, or the engines of a data-parallel domain (DP) each
compute one of them, and exchange data in every layer.

A batch is chosen from the whole queue (`window_size`), but at most from its first `MAX_WINDOW`
prompts. If these prompts fit into one batch, all are taken. Otherwise the batch with the least
waste is taken. At most `max_passed` batches with later prompts may pass over a prompt. The prompt
is then taken first. So it begins at most `max_passed` batches later than in the order of the queue.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

MAX_PASSED: Final = 8
MAX_WINDOW: Final = 256  # prompts, to limit the cost of one choice


@dataclass(frozen=True, slots=True)
class Place:
    """A prompt that waits. `number` is unique. The engine must compute `num_tokens` tokens."""

    number: int
    num_tokens: int


def window_size(dp_size: int, queue_depth: int) -> int:
    return max(dp_size, queue_depth)


def padding_waste(lengths: Sequence[int]) -> float:
    """The wasted computation of a lockstep batch over the useful one: (longest * n - sum) / sum."""
    total = sum(lengths)
    return (max(lengths) * len(lengths) - total) / total if total else 0.0


@dataclass(slots=True)
class LengthWindow:
    """Chooses batches, for any number of queues.

    A batch from one queue does not count as passing over the prompts of another queue. The caller
    must call `forget` for a prompt that leaves without being in a batch.
    """

    dp_size: int  # the most prompts of one batch
    max_passed: int = MAX_PASSED
    # How many batches with later prompts have passed over each prompt, by the prompt's number.
    _passed: dict[int, int] = field(default_factory=dict)

    def take(self, queue: Sequence[Place]) -> list[int]:
        """Choose the next batch from `queue`, and return the numbers of its prompts.

        The queue has the order in which the prompts would begin without batching.
        """
        window = queue[: min(MAX_WINDOW, window_size(self.dp_size, len(queue)))]
        if len(window) <= self.dp_size:
            batch = list(window)
        else:
            batch = self._overdue(window) or _most_alike(window, self.dp_size)
        self._count_passed(window, {place.number for place in batch})
        return [place.number for place in batch]

    def forget(self, number: int) -> None:
        """Forget a prompt that no longer waits."""
        self._passed.pop(number, None)

    def known(self) -> set[int]:
        """The numbers of the prompts that were passed over and still wait."""
        return set(self._passed)

    def _overdue(self, window: Sequence[Place]) -> list[Place]:
        """A batch that begins with the prompts that may not be passed over again.

        Other prompts with the most similar lengths fill it up. It is empty if no prompt is overdue.
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
    """The `count` prompts, adjacent when sorted by length, with the least waste.

    If several batches have equal waste, the result is the one with the shortest prompts, which ends
    first.
    """
    ordered = sorted(window, key=lambda place: place.num_tokens)
    groups = (ordered[i : i + count] for i in range(len(ordered) - count + 1))
    return min(groups, key=lambda group: padding_waste([place.num_tokens for place in group]))
