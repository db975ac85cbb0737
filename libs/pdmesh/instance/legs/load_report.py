"""Collects what a load report names: requests admitted and prompts computed since the last report.

The master settles its bookings by these ids and learns from the times of prompts. An engine
computes parts of several prompts in one step, so the time between the ends of two prompts says
little about either. So prompts are timed together, as a span: from when the first could begin until
none is left, or until the step ends in which the `_SPAN_PROMPTS`th of them ended. The book is
bounded: requests that do not fit are left out, and their bookings expire at the master.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

MAX_NAMED: Final = 4096
_NOT_TIMED: Final = 0.0
_SAME_STEP_S: Final = 0.0005  # prompts that end in the same step end together
_SPAN_PROMPTS: Final = 16
_LEAST_S: Final = 1e-4


@dataclass(frozen=True, slots=True)
class Computed:
    """`seconds` is the time of this prompt and of those before it whose `seconds` are 0.

    They ended in `num_steps` steps. `num_tokens` is 0 if the prompt was given up; without a
    request either, it only says the time of those before.
    """

    request_id: str
    num_tokens: int
    num_cached_tokens: int
    seconds: float
    num_steps: int = 1


@dataclass(slots=True)
class LoadBook:
    _admitted: list[str] = field(default_factory=list)
    _computed: list[Computed] = field(default_factory=list)
    _open: dict[int, tuple[str, int, float]] = field(default_factory=dict)  # by leg
    _last_end: float = float("-inf")
    _span_began: float = 0.0
    _span_prompts: int = 0
    _span_steps: int = 0

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
        is_new_step = now - self._last_end >= _SAME_STEP_S
        if is_new_step and self._span_prompts >= _SPAN_PROMPTS:
            self._end_span()
        if not self._span_prompts:
            self._span_began, self._span_steps = max(since, self._last_end), 0
        self._span_prompts += 1
        self._span_steps += is_new_step or not self._span_steps
        self._last_end = now
        if self._open:
            self._name(Computed(request_id, num_tokens, num_cached_tokens, _NOT_TIMED))
            return
        seconds = max(_LEAST_S, now - self._span_began)
        self._name(Computed(request_id, num_tokens, num_cached_tokens, seconds, self._span_steps))
        self._span_prompts = 0

    def ended(self, leg: int) -> None:
        """The leg ended, in whatever way. No effect if its prompt was computed."""
        opened = self._open.pop(leg, None)
        if opened is not None:
            self._name(Computed(opened[0], 0, 0, _NOT_TIMED))
            if self._span_prompts and not self._open:
                self._end_span()

    def take(self) -> tuple[list[str], list[Computed]]:
        """(admitted, computed) since the last call."""
        taken = self._admitted, self._computed
        self._admitted, self._computed = [], []
        return taken

    def _end_span(self) -> None:
        """Tell the time of the prompts that ended, without that of a further prompt."""
        seconds = max(_LEAST_S, self._last_end - self._span_began)
        self._name(Computed("", 0, 0, seconds, self._span_steps))
        self._span_prompts = 0

    def _name(self, computed: Computed) -> None:
        if len(self._computed) < MAX_NAMED:
            self._computed.append(computed)
