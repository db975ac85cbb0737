"""The table of an instance's open legs, and the session to which each token of a step belongs.

A leg is a request's stay on this instance. An early decode is a decode leg that begins before
prefill has drawn token 1. The table finds a leg by the engine's number, by session and key, or by
its ticket, a decode's right to pull the leg's KV. A leg leaves the table after its last event to
the gateway. The admission core may keep the leg's slot longer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from opentelemetry.trace import Span

from pdmesh.core.instance.admission import Work
from pdmesh.core.kv.transfer.source_exclusions import KvSource
from pdmesh.instance.legs.outbox import Outbox


@dataclass(slots=True, eq=False)
class Leg:
    number: int
    outbox: Outbox
    key: int
    work: Work
    request_id: str
    num_tokens: int = 0  # most tokens that the engine may compute: prompt and longest answer
    trace_id: str = ""
    ticket_id: str = ""  # empty unless a prefill stages KV
    source: KvSource | None = None  # for a decode: where its KV comes from
    compute_s_per_byte: float = 0.0  # for a decode: compute time of a byte at the prefill
    is_per_layer: bool = False  # for a prefill: the ticket opens while it computes
    began_at: float = 0.0  # when it was admitted, on the host's clock
    is_pulling: bool = False  # for a decode: the pull of its KV has begun
    is_joined: bool = False  # for an early decode: token 1 is known
    has_first: bool = False  # for a prefill: token 1 is drawn; for a decode: the KV is here
    overdue: asyncio.TimerHandle | None = None
    span: Span | None = None
    transfer_span: Span | None = None


@dataclass(frozen=True, slots=True)
class Route:
    """One session's part of a token batch: the keys of its legs, and their places in the batch."""

    outbox: Outbox
    keys: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)


@dataclass(slots=True)
class LegTable:
    _by_number: dict[int, Leg] = field(default_factory=dict)
    _by_key: dict[Outbox, dict[int, Leg]] = field(default_factory=dict)
    _by_ticket: dict[str, Leg] = field(default_factory=dict)
    num_open_tokens: int = 0  # the sum of all legs' `num_tokens`
    _routed: Sequence[int] = ()
    _routes: list[Route] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self._by_number)

    @property
    def num_tickets(self) -> int:
        """The number of prefills with a ticket. A ticket counts from admission until it closes."""
        return len(self._by_ticket)

    def add(self, leg: Leg) -> None:
        self._by_number[leg.number] = leg
        self.num_open_tokens += leg.num_tokens
        self._by_key.setdefault(leg.outbox, {})[leg.key] = leg
        if leg.ticket_id:
            self._by_ticket[leg.ticket_id] = leg

    def remove(self, leg: Leg) -> None:
        """Remove a leg whose last event was sent. Idempotent.

        `with_ticket` still finds the leg until `close_ticket`.
        """
        if self._by_number.pop(leg.number, None) is None:
            return
        self.num_open_tokens -= leg.num_tokens
        keys = self._by_key[leg.outbox]
        del keys[leg.key]
        if not keys:
            del self._by_key[leg.outbox]
        self._routed = ()

    def close_ticket(self, ticket_id: str) -> Leg | None:
        """Remove the ticket. Returns its prefill, or None if the ticket is closed already."""
        return self._by_ticket.pop(ticket_id, None)

    def is_ticket_open(self, ticket_id: str) -> bool:
        return ticket_id in self._by_ticket

    def with_ticket(self, number: int) -> Leg | None:
        """Find a prefill whose ticket is open, even if the leg was removed.

        The search is linear, since few tickets are open at once.
        """
        return next((leg for leg in self._by_ticket.values() if leg.number == number), None)

    def get(self, number: int) -> Leg | None:
        return self._by_number.get(number)

    def has_any(self, outbox: Outbox) -> bool:
        return outbox in self._by_key

    def find(self, outbox: Outbox, key: int) -> Leg | None:
        return self._by_key.get(outbox, _NO_LEGS).get(key)

    def of_session(self, outbox: Outbox) -> list[Leg]:
        return list(self._by_key.get(outbox, _NO_LEGS).values())

    def all(self) -> list[Leg]:
        return list(self._by_number.values())

    def route(self, legs: Sequence[int]) -> list[Route]:
        """Group a batch by session.

        The result is cached for the `legs` object: engines pass the same object while the batch has
        the same members.
        """
        if legs is not self._routed:
            routes: dict[Outbox, Route] = {}
            for position, number in enumerate(legs):
                if (leg := self._by_number.get(number)) is None:
                    continue
                if (route := routes.get(leg.outbox)) is None:
                    route = routes[leg.outbox] = Route(leg.outbox)
                route.keys.append(leg.key)
                route.positions.append(position)
            self._routed, self._routes = legs, list(routes.values())
        return self._routes


_NO_LEGS: dict[int, Leg] = {}
