"""The table of legs that gateways still hear about: their sessions, and where a step's tokens go.

A leg is found by the engine's number for it, by (session, key), and by its ticket. It leaves the
table with its last event, while the admission core may hold its slot a little longer.
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
    num_tokens: int = 0  # the most that the engine computes for it: prompt and longest answer
    trace_id: str = ""
    ticket_id: str = ""  # of a prefill, once admitted
    source: KvSource | None = None  # of a decode: where its KV comes from
    compute_s_per_byte: float = 0.0  # of a decode: time to compute a byte of its KV; 0: not known
    is_per_layer: bool = False  # its ticket is open while it computes, and may close before it ends
    began_at: float = 0.0  # when it was admitted, on the host's clock
    is_pulling: bool = False  # of a decode: its turn to pull its KV has come
    is_joined: bool = False  # of an early decode: token 1 is known
    has_first: bool = False  # token 1 was drawn (prefill), or the KV has come (decode)
    overdue: asyncio.TimerHandle | None = None
    span: Span | None = None
    transfer_span: Span | None = None


@dataclass(frozen=True, slots=True)
class Route:
    """One session's part of a token batch: its keys, and where their tokens are in the batch."""

    outbox: Outbox
    keys: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)


@dataclass(slots=True)
class LegTable:
    _by_number: dict[int, Leg] = field(default_factory=dict)
    _by_key: dict[Outbox, dict[int, Leg]] = field(default_factory=dict)
    _by_ticket: dict[str, Leg] = field(default_factory=dict)
    num_open_tokens: int = 0  # the most that the engine computes for all of them
    _routed: Sequence[int] = ()
    _routes: list[Route] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self._by_number)

    @property
    def num_tickets(self) -> int:
        """Prefills that have a ticket, from admission to its closing."""
        return len(self._by_ticket)

    def add(self, leg: Leg) -> None:
        self._by_number[leg.number] = leg
        self.num_open_tokens += leg.num_tokens
        self._by_key.setdefault(leg.outbox, {})[leg.key] = leg
        if leg.ticket_id:
            self._by_ticket[leg.ticket_id] = leg

    def remove(self, leg: Leg) -> None:
        """Remove a leg that gateways hear no more about. Idempotent.

        Its ticket stays known until `close_ticket`.
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
        """The prefill that had the ticket; None if the ticket is closed already."""
        return self._by_ticket.pop(ticket_id, None)

    def is_ticket_open(self, ticket_id: str) -> bool:
        return ticket_id in self._by_ticket

    def with_ticket(self, number: int) -> Leg | None:
        """The prefill whose ticket is open, whether or not a gateway still hears about it.

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

        Engines pass the same `legs` object while the batch keeps its members.
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
