"""Decides which resources a request must release when it leaves a leg, loses its KV, or ends.

A leg is the request's stay on one instance, and a ticket is the right to pull the KV that a prefill
has computed. A request has at most one active leg and at most one open ticket. If KV is handed over
layer by layer, the request may also have an early decode, which becomes the active leg at token 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pdmesh.core.request.early_decode import EarlyDecode, OpenLeg
from pdmesh.core.request.events import (
    AbortLeg,
    Candidate,
    Effect,
    ForgetLeg,
    ReleaseTicket,
    TicketHeld,
)


@dataclass(frozen=True, slots=True)
class OpenTicket:
    """The KV of a finished prefill leg. The prefill keeps this KV for the request until `until`."""

    key: int  # of the prefill leg
    holder: Candidate
    held: TicketHeld
    until: float


class Holdings:
    """The resources of a request: at most one active leg, one early decode and one ticket.

    `decoding_key` is the key of the active leg once it decodes and needs no ticket any more. Until
    then it is 0. `Request.push_token` accepts tokens only under this key.
    """

    __slots__ = ("decoding_key", "early", "kv_by", "leg", "ticket")

    def __init__(self) -> None:
        self.leg: OpenLeg | None = None
        self.early: EarlyDecode | None = None
        self.ticket: OpenTicket | None = None
        # Set when the ticket's holder is lost: a decode that has the KV must report it by this
        # time.
        self.kv_by = math.inf
        self.decoding_key = 0

    @property
    def has_lost_holder(self) -> bool:
        return self.kv_by < math.inf

    @property
    def holder_ids(self) -> tuple[str, ...]:
        return () if self.ticket is None else (self.ticket.holder.instance_id,)

    def is_active(self, key: int) -> bool:
        return self.leg is not None and self.leg.key == key

    def close_leg(self) -> tuple[list[Effect], Candidate]:
        """Close the active leg, which has ended. Returns the effects and the leg's instance."""
        assert self.leg is not None
        leg, self.leg, self.decoding_key = self.leg, None, 0
        return [ForgetLeg(leg.key)], leg.to

    def turn_into_ticket(self, held: TicketHeld, now: float) -> None:
        """Replace the active prefill leg, which has ended, by a ticket for its KV."""
        assert self.leg is not None
        leg, self.leg = self.leg, None
        self.ticket = OpenTicket(leg.key, leg.to, held, now + held.lease_s)

    def close_ticket(self) -> list[Effect]:
        """Close the ticket, because the active decode has the KV or the holder is lost."""
        if self.ticket is None:
            return []
        ticket, self.ticket, self.kv_by = self.ticket, None, math.inf
        return [ForgetLeg(ticket.key)]

    def drop_all(self) -> list[Effect]:
        """Abort the active leg and the early decode, and release the open ticket."""
        effects: list[Effect] = []
        if self.leg is not None:
            effects.append(AbortLeg(self.leg.key))
        if self.early is not None:
            effects += self.early.drop()
        if self.has_lost_holder:
            effects += self.close_ticket()
        elif self.ticket is not None:
            effects.append(ReleaseTicket(self.ticket.key, self.ticket.held.ticket_id))
        self.leg = self.early = self.ticket = None
        self.decoding_key, self.kv_by = 0, math.inf
        return effects
