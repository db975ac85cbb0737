"""A formula for how long an engine's steps take, depending on the batch.

Like a transformer's work, the time is the sum of a fixed cost per step, a cost per token, and a
cost of attention over the context. The simulated engine sleeps for these times. The virtual mesh
(a simulation without processes) adds them up. `core/sizing`, which plans deployments, uses the
formula as well.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Law:
    """The coefficients, in seconds. If all are zero, only the mesh costs time."""

    name: str
    prefill_fixed_s: float = 0.0
    prefill_token_s: float = 0.0
    prefill_pair_s: float = 0.0  # per pair of a computed token and a token that it attends to
    step_fixed_s: float = 0.0
    step_sequence_s: float = 0.0  # per sequence in the decode batch
    step_context_s: float = 0.0  # per token of context over the whole batch
    step_experts_s: float = 0.0  # for reading all routed experts; a batch reads only some
    expert_share: float = 0.0  # the share of the experts that one token uses
    pads: bool = False  # each prompt of a batch takes as long as the longest one
    reads_once: bool = False  # prompts and decodes of one step read the weights together

    def prefill_s(
        self, num_tokens: int, num_cached: int = 0, batch: int = 1, longest: int = 0
    ) -> float:
        """The time to compute `batch` prompts, which have `num_tokens` tokens to compute in all.

        Each prompt has `num_cached` more tokens that need no computing. `longest` is the largest
        number of tokens to compute for one prompt.
        """
        if num_tokens <= 0:
            return 0.0
        if self.pads:
            num_tokens = max(num_tokens, batch * longest)
        pairs = num_tokens * (num_cached + num_tokens / (2 * max(batch, 1)))
        return (
            self.prefill_fixed_s + num_tokens * self.prefill_token_s + pairs * self.prefill_pair_s
        )

    def step_s(self, batch: float, num_context: float) -> float:
        """The time of one decode step of `batch` sequences with `num_context` tokens in all."""
        if batch <= 0:
            return 0.0
        return self.read_s(batch) + self._own_s(batch, num_context)

    def mixed_s(self, prefill_s: float, batch: float, num_context: float) -> float:
        """The time of a step that computes prompts and also decodes.

        Without the decodes, it would take `prefill_s`. With `reads_once`, the weights are read
        while the prompts are computed.
        """
        if batch <= 0:
            return prefill_s
        if not self.reads_once:
            return prefill_s + self.step_s(batch, num_context)
        return max(prefill_s, self.read_s(batch)) + self._own_s(batch, num_context)

    def read_s(self, batch: float) -> float:
        """The part of a decode step that its sequences share: overhead, and reading the weights."""
        if not self.step_experts_s:
            return self.step_fixed_s
        touched: float = 1 - (1 - self.expert_share) ** batch
        return self.step_fixed_s + self.step_experts_s * touched

    def _own_s(self, batch: float, num_context: float) -> float:
        """The part of a decode step that each sequence adds."""
        return batch * self.step_sequence_s + num_context * self.step_context_s
