"""The times at which the tokens of one answer came."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timing:
    """The times of an answer with at least three tokens, in milliseconds."""

    ttft_ms: float
    gap_ms: float  # from token 1 to 2; includes the hand-over, unless token 1 waited for it
    later_ms: float  # mean gap between later tokens, which is a decode step
    tokens: tuple[int, ...]

    @property
    def second_ms(self) -> float:
        """The time until token 2, which always includes the whole hand-over."""
        return self.ttft_ms + self.gap_ms

    @classmethod
    def of(cls, asked: float, times: Sequence[float], tokens: Sequence[int]) -> Timing:
        assert len(times) == len(tokens) >= 3, (len(times), len(tokens))
        return cls(
            (times[0] - asked) * 1e3,
            (times[1] - times[0]) * 1e3,
            (times[-1] - times[1]) / (len(times) - 2) * 1e3,
            tuple(tokens),
        )
