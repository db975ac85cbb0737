"""Decides which decode pulls a request's KV while the prefill still computes it (S48, per layer).

A ticket is the right to pull the KV of one prompt, and a leg is a request's stay on one instance.
In per-layer mode, the gateway offers the ticket to a decode as soon as the prefill accepts the
request. This early decode then pulls each layer when the layer is computed, and takes over the
request at token 1. If a decode rejects the offer, the next one is asked. If the decode fails before
token 1, the request continues without an early decode, and a decode is chosen at token 1, as in
whole mode, where KV is pulled after prefill. If the decode is lost after it has all KV, the ticket
is used up, so the prefill must be repeated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pdmesh.core.request.events import (
    AbortLeg,
    Candidate,
    Effect,
    Event,
    ForgetLeg,
    KvAdvanced,
    LegAccepted,
    LegFailed,
    LegKvReceived,
    LegLost,
    LegRejected,
    SendStart,
    TicketHeld,
)


@dataclass(frozen=True, slots=True)
class OpenLeg:
    key: int
    to: Candidate


class EarlyDecode:
    """The early decode of one request. At most one candidate has an open offer at a time.

    `start` makes the offer to a candidate, under a new leg key.
    """

    __slots__ = (
        "_answer_s",
        "_candidates",
        "_start",
        "answer_by",
        "has_kv",
        "is_accepted",
        "leg",
        "num_rejections",
        "refused",
        "ticket",
    )

    def __init__(
        self,
        ticket: TicketHeld,
        candidates: Sequence[Candidate],
        start: Callable[[TicketHeld, Candidate], SendStart],
        answer_s: float,
    ) -> None:
        self.ticket = ticket
        self.leg: OpenLeg | None = None
        self.is_accepted = False
        self.has_kv = False
        self.num_rejections = 0
        self.answer_by = math.inf
        self.refused: list[Candidate] = []  # these decodes are not asked again at token 1
        self._candidates = list(candidates)
        self._start, self._answer_s = start, answer_s

    def offer(self, now: float) -> list[Effect]:
        """Offer the ticket to the next candidate.

        If none is left, a decode is chosen at token 1.
        """
        if not self._candidates:
            return []
        start = self._start(self.ticket, self._candidates.pop(0))
        self.leg, self.answer_by = OpenLeg(start.key, start.to), now + self._answer_s
        return [start]

    def owns(self, key: int) -> bool:
        return self.leg is not None and self.leg.key == key

    @property
    def is_spent(self) -> bool:
        """Whether a decode has taken the KV and was then lost."""
        return self.has_kv and self.leg is None

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Handle an event of the open leg. Events that can only come after token 1 are dropped."""
        match event:
            case LegAccepted() | KvAdvanced():
                self._accepted()
            case LegKvReceived():
                self._accepted()
                self.has_kv = True
            case LegRejected():
                self.num_rejections += 1
                return self._close(is_final=event.is_final or event.is_too_long) + self.offer(now)
            case LegFailed() | LegLost():
                return self._close(is_final=True)
        return []

    def tick(self, now: float) -> list[Effect]:
        """Give up on a decode that does not answer."""
        return self.drop() if now >= self.answer_by else []

    def drop(self) -> list[Effect]:
        if self.leg is None:
            return []
        leg = self.leg
        self._close(is_final=True)
        return [AbortLeg(leg.key)]

    def _accepted(self) -> None:
        self.is_accepted, self.answer_by = True, math.inf

    def _close(self, *, is_final: bool) -> list[Effect]:
        assert self.leg is not None
        leg, self.leg, self.answer_by = self.leg, None, math.inf
        self.is_accepted = False
        if is_final:
            self.refused.append(leg.to)
        return [ForgetLeg(leg.key)]
