"""Collects which requests an instance admitted, and how long the prompts took, for load reports.

A report covers the time since the last report. The master keeps a booking, which is planned work,
for each request that it plans for an instance. The report tells the master which bookings are done,
and the times improve its predictions. In `LoadBook`, a leg is a request's stay on this instance.

An engine computes parts of several prompts in one step, so the time between the ends of two prompts
says little about either prompt. Therefore prompts are timed together, as a span. A span begins when
its first prompt could begin. It ends when no prompt is left, or with the step in which its
`_SPAN_PROMPTS`th prompt ends. The number of entries in a report is bounded. Requests beyond the
bound are left out, and their bookings expire at the master.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, NamedTuple

MAX_NAMED: Final = 4096
_NOT_TIMED: Final = 0.0
_SAME_STEP_S: Final = 0.0005  # prompts whose ends are closer than this end in the same step
_SPAN_PROMPTS: Final = 16
_LEAST_S: Final = 1e-4


@dataclass(frozen=True, slots=True)
class Computed:
    """An entry for a prompt that was computed or given up.

    If `seconds` is not 0, the entry ends a span, and `seconds` is the time of the span: of this
    prompt and of the entries directly before it whose `seconds` are 0. These prompts ended in
    `num_steps` steps, and on average `num_beside` sequences decoded in the same steps. `num_tokens`
    is 0 if the prompt was given up. If `request_id` is empty as well, the entry only gives the time
    of the prompts before it.
    """

    request_id: str
    num_tokens: int
    num_cached_tokens: int
    seconds: float
    num_steps: int = 1
    num_beside: float = 0.0


class _Open(NamedTuple):
    """A prompt that is not computed yet. `beside_s` is `LoadBook._beside_s` when it arrived."""

    request_id: str
    num_tokens: int
    since: float
    beside_s: float


@dataclass(slots=True)
class _Span:
    """Prompts that are timed together since `began`."""

    began: float = 0.0
    beside_s: float = 0.0  # `LoadBook._beside_s` when the span began
    num_prompts: int = 0
    num_steps: int = 0


@dataclass(slots=True)
class LoadBook:
    _admitted: list[str] = field(default_factory=list)
    _computed: list[Computed] = field(default_factory=list)
    _open: dict[int, _Open] = field(default_factory=dict)  # by leg
    _span: _Span = field(default_factory=_Span)
    _last_end: float = float("-inf")
    _last_beside_s: float = 0.0  # `_beside_s` at `_last_end`
    _decoding: set[int] = field(default_factory=set)  # legs
    _beside_s: float = 0.0  # seconds of decoding, summed over all sequences, until `_counted_at`
    _counted_at: float = 0.0

    def admitted(self, leg: int, request_id: str, num_prompt_tokens: int, now: float) -> None:
        """Record an admitted leg. A decode has 0 `num_prompt_tokens`, as it computes no prompt."""
        if len(self._admitted) < MAX_NAMED:
            self._admitted.append(request_id)
        if num_prompt_tokens:
            self._open[leg] = _Open(request_id, num_prompt_tokens, now, self._count(now))

    def computed(self, leg: int, num_cached_tokens: int, now: float) -> None:
        opened = self._open.pop(leg, None)
        if opened is None:
            return
        is_new_step = now - self._last_end >= _SAME_STEP_S
        if is_new_step and self._span.num_prompts >= _SPAN_PROMPTS:
            self._end_span()
        span = self._span
        if not span.num_prompts:
            span.began, span.beside_s = max(
                (opened.since, opened.beside_s), (self._last_end, self._last_beside_s)
            )
            span.num_steps = 0
        span.num_prompts += 1
        span.num_steps += is_new_step or not span.num_steps
        self._last_end, self._last_beside_s = now, self._count(now)
        request_id, num_tokens = opened.request_id, opened.num_tokens
        if self._open:
            self._name(Computed(request_id, num_tokens, num_cached_tokens, _NOT_TIMED))
        else:
            self._end_span(request_id, num_tokens, num_cached_tokens)

    def decodes(self, leg: int, now: float) -> None:
        """Record that the leg decodes from now on, until it ends."""
        self._count(now)
        self._decoding.add(leg)

    def ended(self, leg: int, now: float) -> None:
        """Record the end of a leg. A prompt that is not computed by then was given up."""
        self._count(now)
        self._decoding.discard(leg)
        opened = self._open.pop(leg, None)
        if opened is not None:
            self._name(Computed(opened.request_id, 0, 0, _NOT_TIMED))
            if self._span.num_prompts and not self._open:
                self._end_span()

    def take(self) -> tuple[list[str], list[Computed]]:
        """(admitted, computed) since the last call."""
        taken = self._admitted, self._computed
        self._admitted, self._computed = [], []
        return taken

    def _count(self, now: float) -> float:
        """The seconds of decoding so far, summed over all sequences."""
        self._beside_s += len(self._decoding) * max(0.0, now - self._counted_at)
        self._counted_at = max(now, self._counted_at)
        return self._beside_s

    def _end_span(
        self, request_id: str = "", num_tokens: int = 0, num_cached_tokens: int = 0
    ) -> None:
        """Add an entry with the time of the span. The given prompt is the span's last one.

        If no prompt is given, all prompts of the span already have entries.
        """
        span = self._span
        seconds = max(_LEAST_S, self._last_end - span.began)
        num_beside = (self._last_beside_s - span.beside_s) / seconds
        self._name(
            Computed(request_id, num_tokens, num_cached_tokens, seconds, span.num_steps, num_beside)
        )
        span.num_prompts = 0

    def _name(self, computed: Computed) -> None:
        if len(self._computed) < MAX_NAMED:
            self._computed.append(computed)
