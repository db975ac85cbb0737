"""The decode of a request whose KV is handed on while prefill computes it (S48, per layer).

It is offered the ticket at prefill's Accepted, so that it pulls each layer as it comes, and takes over at token 1. Until
then it is a bet: a refusal asks the next decode, a failure ends the bet, and a request without one is
handed on at token 1 as in whole-model mode. Only a decode that has taken the KV and then goes away costs
the request its prefill, for the ticket is spent.
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
class EarlyLeg:
    key: int
    to: Candidate


class EarlyDecode:
    """`start` makes the offer to a candidate, under a key of its own. At most one leg is open at a time."""

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
        start: Callable[[Candidate], SendStart],
        answer_s: float,
    ) -> None:
        self.ticket = ticket
        self.leg: EarlyLeg | None = None
        self.is_accepted = False
        self.has_kv = False
        self.num_rejections = 0
        self.answer_by = math.inf
        self.refused: list[Candidate] = []  # will not take it at token 1 either
        self._candidates = list(candidates)
        self._start, self._answer_s = start, answer_s

    def offer(self, now: float) -> list[Effect]:
        """Ask the next candidate. With none left, the ticket waits for token 1."""
        if not self._candidates:
            return []
        start = self._start(self._candidates.pop(0))
        self.leg, self.answer_by = EarlyLeg(start.key, start.to), now + self._answer_s
        return [start]

    def owns(self, key: int) -> bool:
        return self.leg is not None and self.leg.key == key

    @property
    def is_spent(self) -> bool:
        """The KV was taken, by a decode that is gone."""
        return self.has_kv and self.leg is None

    def handle(self, event: Event, now: float) -> list[Effect]:
        """An event of its leg. What only follows token 1 means nothing yet and is dropped."""
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
