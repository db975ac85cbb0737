"""Collects what a load report names: requests admitted and prompts computed since the last report.

The master settles its bookings by these ids and learns from the times of prompts. A prompt's time
counts from when it could begin: its own admission, or the end of the previous prompt. The book is
bounded: requests that do not fit are left out, and their bookings expire at the master.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

MAX_NAMED: Final = 4096
_NOT_TIMED: Final = 0.0
# Prompts that end in the same step end together, so only the first of them is timed.
_SAME_STEP_S: Final = 0.0005


@dataclass(frozen=True, slots=True)
class Computed:
    """`seconds` is 0 if the prompt was given up, or computed in one step with another."""

    request_id: str
    num_tokens: int
    num_cached_tokens: int
    seconds: float


@dataclass(slots=True)
class LoadBook:
    _admitted: list[str] = field(default_factory=list)
    _computed: list[Computed] = field(default_factory=list)
    _open: dict[int, tuple[str, int, float]] = field(default_factory=dict)  # by leg
    _last_end: float = float("-inf")

    def admitted(self, leg: int, request_id: str, num_prompt_tokens: int, now: float) -> None:
        """`num_prompt_tokens` is 0 for decode, which computes no prompt."""
        if len(self._admitted) < MAX_NAMED:
            self._admitted.append(request_id)
        if num_prompt_tokens:
            self._open[leg] = (request_id, num_prompt_tokens, now)

    def computed(self, leg: int, num_cached_tokens: int, now: float) -> None:
        opened = self._open.pop(leg, None)
        if opened is None:
            return
        request_id, num_tokens, since = opened
        seconds = now - max(since, self._last_end)
        self._last_end = now
        if seconds < _SAME_STEP_S:
            seconds = _NOT_TIMED
        self._name(Computed(request_id, num_tokens, num_cached_tokens, seconds))

    def ended(self, leg: int) -> None:
        """The leg ended, in whatever way. No effect if its prompt was computed."""
        opened = self._open.pop(leg, None)
        if opened is not None:
            self._name(Computed(opened[0], opened[1], 0, _NOT_TIMED))

    def take(self) -> tuple[list[str], list[Computed]]:
        """(admitted, computed) since the last call."""
        taken = self._admitted, self._computed
        self._admitted, self._computed = [], []
        return taken

    def _name(self, computed: Computed) -> None:
        if len(self._computed) < MAX_NAMED:
            self._computed.append(computed)
