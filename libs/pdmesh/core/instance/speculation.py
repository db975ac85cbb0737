"""Decides how many tokens to propose per step: fewer for larger batches and where fewer are right,
none if it does not pay (S118).

A decode step of a small batch waits for memory. So checking k proposed tokens of each sequence,
beside the one it draws, costs next to nothing. In a large batch each costs as much as a token
drawn. `acceptance` is the chance a that a proposed token is right, given that those before it were.
Then a step yields 1 + a + ... + a^k tokens of a sequence. How often they are right depends on what
is written: a setting is where it begins, and `AdaptiveSpeculation` follows what was checked.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Final

LEAST_GAIN: Final = 1.05  # a smaller gain may be lost when acceptance varies
PROBE_EVERY: Final = 64  # steps: one token is proposed where none pays, or a change went unseen
_MEMORY: Final = 200  # tokens: those checked before count for little
_GRAIN: Final = 0.02  # of acceptance: schedules are made for so many values


@dataclass(frozen=True, slots=True)
class Speculation:
    """`token_cost` is what checking one token costs, as a share of a step's fixed cost.

    `max_tokens` 0: no token is ever proposed.
    """

    max_tokens: int
    acceptance: float
    token_cost: float

    def tokens_per_step(self, num_proposed: int) -> float:
        """Tokens of one sequence that a step is expected to yield."""
        return sum(self.acceptance**n for n in range(num_proposed + 1))

    def speedup(self, num_proposed: int, batch: int) -> float:
        """A batch's tokens per second, relative to proposing none."""
        alone = 1 + self.token_cost * batch
        checked = 1 + self.token_cost * batch * (1 + num_proposed)
        return self.tokens_per_step(num_proposed) * alone / checked

    def num_proposed(self, batch: int) -> int:
        """The best number for this batch; 0 if the best gains less than 5 %."""
        best = max(range(self.max_tokens + 1), key=lambda k: (self.speedup(k, batch), -k))
        return best if self.speedup(best, batch) >= LEAST_GAIN else 0

    def schedule(self, max_batch: int) -> list[tuple[int, int, int]]:
        """(first batch size, last, tokens to propose) for all sizes from 1 on."""
        ranges: list[tuple[int, int, int]] = []
        for batch in range(1, max_batch + 1):
            count = self.num_proposed(batch)
            if ranges and ranges[-1][2] == count:
                ranges[-1] = (ranges[-1][0], batch, count)
            else:
                ranges.append((batch, batch, count))
        return ranges


@dataclass(slots=True)
class AdaptiveSpeculation:
    """How many tokens to propose at each step, by how many of those before were right.

    `checked` is told of each sequence's proposal; `counts` begins a step.
    """

    assumed: Speculation
    max_batch: int
    acceptance: float = field(init=False)
    _num_steps: int = 0

    def __post_init__(self) -> None:
        self.acceptance = self.assumed.acceptance

    def checked(self, num_proposed: int, num_accepted: int) -> None:
        """The first that is wrong ends a proposal: what follows it says nothing."""
        num_tried = num_accepted + (num_accepted < num_proposed)
        if num_tried:
            kept = (1 - 1 / _MEMORY) ** num_tried
            self.acceptance = kept * self.acceptance + (1 - kept) * num_accepted / num_tried

    def counts(self) -> list[int]:
        """Tokens to propose at the next step, by batch size (index 0: no batch)."""
        self._num_steps += 1
        measured = round(self.acceptance / _GRAIN) * _GRAIN
        return _counts(
            replace(self.assumed, acceptance=min(measured, 1 - _GRAIN)),
            self.max_batch,
            min(self.assumed.max_tokens, int(self._num_steps % PROBE_EVERY == 0)),
        )


@lru_cache(maxsize=256)
def _counts(speculation: Speculation, max_batch: int, least: int) -> list[int]:
    return [0, *(max(least, speculation.num_proposed(b)) for b in range(1, max_batch + 1))]


NO_SPECULATION: Final = Speculation(0, 0.0, 0.0)
