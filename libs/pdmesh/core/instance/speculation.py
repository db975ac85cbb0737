"""Decides how many tokens to propose per step: fewer for larger batches, none if it does not pay
(S118).

A decode step of a small batch waits for memory. So checking k proposed tokens of each sequence,
beside the one it draws, costs next to nothing. In a large batch each costs as much as a token
drawn. `acceptance` is the chance a that a proposed token is right, given that those before it were.
Then a step yields 1 + a + ... + a^k tokens of a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

LEAST_GAIN: Final = 1.05  # a smaller gain may be lost when acceptance varies


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


NO_SPECULATION: Final = Speculation(0, 0.0, 0.0)
