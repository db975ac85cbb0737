"""Decides how many tokens a decode proposes per step (S118).

A decode step of a small batch waits for memory. So checking k proposed tokens of each sequence,
beside the token that the step draws, costs almost nothing. In a large batch, each check costs as
much as drawing a token. So fewer tokens are proposed for larger batches and for text that is hard
to predict, and none if that does not pay.

`acceptance` is the probability a that a proposed token is right if all earlier tokens of the
proposal are right. A step is then expected to yield 1 + a + ... + a^k tokens of a sequence.
`acceptance` depends on the text, and the cost of a check depends on the machine. Both start from a
setting. `AdaptiveSpeculation` adapts them to the results and times of the steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import lru_cache
from typing import Final

from pdmesh.core.speculation.token_cost import TokenCost

LEAST_GAIN: Final = 1.05  # a smaller speedup may be lost when acceptance varies
# Once in this many steps, a token is proposed even if that does not pay, to notice changes.
PROBE_EVERY: Final = 64
# Once in this many steps, no token is proposed, to measure the cost of a check.
PAUSE_EVERY: Final = 256
_MEMORY: Final = 200  # acceptance is measured over about this many checked tokens
_GRAIN: Final = 0.02  # acceptance is rounded to a multiple of this, so there are few schedules
_BAND: Final = 0.03  # a smaller change of the acceptance is mostly noise, and is ignored
_COST_BAND: Final = 1.5  # a change of the cost of a token by a smaller factor is ignored


class Method(StrEnum):
    """Where proposed tokens come from."""

    PROMPT_LOOKUP = "prompt_lookup"  # from the request's own text
    SUFFIX = "suffix"  # from the texts of other requests as well
    DRAFT_MODEL = "draft_model"  # a small model with the same vocabulary
    EAGLE = "eagle"  # a head that reads the model's hidden states
    MTP = "mtp"  # layers of the model itself

    @property
    def has_kv(self) -> bool:
        """Whether the method keeps KV of its own for the prompt, which prefill must compute."""
        return self in (Method.DRAFT_MODEL, Method.EAGLE, Method.MTP)


@dataclass(frozen=True, slots=True)
class Speculation:
    """How tokens are proposed, for one setting of acceptance and cost.

    `token_cost` is the cost of checking one token, as a share of a step's fixed cost. If
    `max_tokens` is 0, no token is ever proposed. If `is_fixed`, exactly `max_tokens` are always
    proposed.
    """

    max_tokens: int
    acceptance: float
    token_cost: float
    method: Method = Method.PROMPT_LOOKUP
    model: str = ""  # folder of the draft model or the head
    is_fixed: bool = False

    def at_prefill(self) -> Speculation:
        """The speculation of a prefill: one token if the method has KV, otherwise none.

        Proposing makes the draft model compute its KV of the prompt. The proposed token is not
        checked, because a prefill's requests end with token 1.
        """
        if not self.max_tokens or not self.method.has_kv:
            return NO_SPECULATION
        return replace(self, max_tokens=1, is_fixed=True)

    def tokens_per_step(self, num_proposed: int) -> float:
        """How many tokens of one sequence a step is expected to yield."""
        return sum(self.acceptance**n for n in range(num_proposed + 1))

    def speedup(self, num_proposed: int, batch: int) -> float:
        """The tokens per second of a batch, relative to a step without proposals."""
        alone = 1 + self.token_cost * batch
        checked = 1 + self.token_cost * batch * (1 + num_proposed)
        return self.tokens_per_step(num_proposed) * alone / checked

    def num_proposed(self, batch: int) -> int:
        """The best number for this batch, or 0 if the best gains less than 5 %."""
        if self.is_fixed:
            return self.max_tokens
        best = max(range(self.max_tokens + 1), key=lambda k: (self.speedup(k, batch), -k))
        return best if self.speedup(best, batch) >= LEAST_GAIN else 0

    def schedule(self, max_batch: int) -> list[tuple[int, int, int]]:
        """(first batch size, last batch size, tokens to propose), for sizes 1 to `max_batch`."""
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
    """Decides how many tokens to propose at each step, from measured acceptance and step times.

    Call `counts` before each step, `checked` for each sequence's proposal, and `computed` for each
    step without prompts. The schedule changes only if a measured value leaves a band around the
    value on which the schedule is based. So noise does not change the schedule back and forth.
    """

    assumed: Speculation
    max_batch: int
    acceptance: float = field(init=False)  # the measured value
    _followed: float = field(init=False)  # the schedule is based on this and on `_token_cost`
    _token_cost: float = field(init=False)
    _costs: TokenCost = field(init=False)
    _num_steps: int = 0

    def __post_init__(self) -> None:
        self.acceptance = self._followed = self.assumed.acceptance
        self._token_cost = self.assumed.token_cost
        self._costs = TokenCost(self._token_cost)

    def checked(self, num_proposed: int, num_accepted: int) -> None:
        """Learn from one proposal. Tokens after the first wrong one are not counted."""
        num_tried = num_accepted + (num_accepted < num_proposed)
        if num_tried:
            kept = (1 - 1 / _MEMORY) ** num_tried
            self.acceptance = kept * self.acceptance + (1 - kept) * num_accepted / num_tried

    def computed(self, num_tokens: int, seconds: float) -> None:
        """Learn from the time of a step that computed `num_tokens` tokens, none of a prompt."""
        self._costs.computed(num_tokens, seconds)

    @property
    def _may_pause(self) -> bool:
        """Whether proposals may pause for a step. A method with KV needs it for each token."""
        return not (self.assumed.is_fixed or self.assumed.method.has_kv)

    def counts(self) -> list[int]:
        """The tokens to propose at the next step, by batch size (index 0 is an empty batch)."""
        self._num_steps += 1
        if self._num_steps % PAUSE_EVERY == PAUSE_EVERY - 1 and self._may_pause:
            return [0] * (self.max_batch + 1)
        if abs(self.acceptance - self._followed) > _BAND:
            self._followed = round(self.acceptance / _GRAIN) * _GRAIN
        if not 1 / _COST_BAND < self._costs.share / self._token_cost < _COST_BAND:
            self._token_cost = self._costs.share
        acceptance = min(self._followed, 1 - _GRAIN)
        return _counts(
            replace(self.assumed, acceptance=acceptance, token_cost=self._token_cost),
            self.max_batch,
            min(self.assumed.max_tokens, int(self._num_steps % PROBE_EVERY == 0)),
        )


@lru_cache(maxsize=256)
def _counts(speculation: Speculation, max_batch: int, least: int) -> list[int]:
    return [0, *(max(least, speculation.num_proposed(b)) for b in range(1, max_batch + 1))]


NO_SPECULATION: Final = Speculation(0, 0.0, 0.0)
