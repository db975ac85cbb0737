"""The parameters with which a request changes the model's logits before a token is drawn.

Names and meanings are the same as in vLLM's `SamplingParams`. Penalties, `min_tokens` and
`bad_words` depend on the answer's tokens so far, including tokens that other instances drew.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pdmesh.core.sampling.thinking_budget import ThinkingBudget
from pdmesh.errors import InvalidRequest

MAX_BIASES: Final = 1024
MAX_BAD_WORDS: Final = 1000  # token sequences
MAX_ALLOWED: Final = 65_536
MAX_LOGPROB_IDS: Final = 128  # token ids whose log probabilities are reported; as in vLLM
_MAX_BIAS: Final = 100.0
_MAX_PENALTY: Final = 100.0  # of a repetition


@dataclass(frozen=True, slots=True)
class LogitShaping:
    """One request's parameters. `top_k` 0 and empty `allowed_token_ids` allow all tokens.

    `bad_words` has sequences of token ids.
    """

    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    min_tokens: int = 0
    # Token ids, each with the value that is added to its logit.
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    thinking_token_budget: ThinkingBudget | None = None

    def check(self, vocab_size: int, max_tokens: int | None = None) -> None:
        """Raises InvalidRequest with the name of the field. NaN is outside every range."""
        _in_range("presence_penalty", self.presence_penalty, -2, 2)
        _in_range("frequency_penalty", self.frequency_penalty, -2, 2)
        _in_range("min_p", self.min_p, 0, 1)
        _in_range("top_k", self.top_k, 0, (1 << 31) - 1)
        if not 0 < self.repetition_penalty <= _MAX_PENALTY:
            raise _refusal("repetition_penalty", f"must be above 0, at most {_MAX_PENALTY:.0f}")
        _in_range("min_tokens", self.min_tokens, 0, (1 << 31) if max_tokens is None else max_tokens)
        _at_most("logit_bias", len(self.logit_bias), MAX_BIASES)
        _at_most("bad_words", len(self.bad_words), MAX_BAD_WORDS)
        _at_most("allowed_token_ids", len(self.allowed_token_ids), MAX_ALLOWED)
        for _, bias in self.logit_bias:
            _in_range("logit_bias", bias, -_MAX_BIAS, _MAX_BIAS)
        _in_vocabulary("logit_bias", [token_id for token_id, _ in self.logit_bias], vocab_size)
        _in_vocabulary("allowed_token_ids", self.allowed_token_ids, vocab_size)
        if self.thinking_token_budget is not None:
            self.thinking_token_budget.check(vocab_size)
        for word in self.bad_words:
            if not word:
                raise _refusal("bad_words", "has an entry without a token")
            _in_vocabulary("bad_words", word, vocab_size)


UNSHAPED: Final = LogitShaping()


def _in_range(field: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise _refusal(field, f"must be between {low:.10g} and {high:.10g}")


def _at_most(field: str, num: int, most: int) -> None:
    if num > most:
        raise _refusal(field, f"has more than {most} entries")


def _in_vocabulary(field: str, ids: list[int] | tuple[int, ...], vocab_size: int) -> None:
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        raise _refusal(field, f"names a token id outside 0 to {vocab_size - 1}")


def _refusal(field: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"{field} {what}", field=field)
