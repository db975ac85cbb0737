"""Tracks the requests that the master has planned and that no load report mentions yet (S93).

Such a request has a booking on the best prefill and the best decode of its plan. A booking counts
as a used slot and as used KV blocks until some instance reports that it has admitted the request.
If that is another instance than the booked one, the booked one no longer counts the request. The
predicted compute time of the prompt counts as waiting work of the prefill, its backlog, until a
report says that the prompt is computed. Bookings that no report names end after a time limit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pdmesh.core.placement.instance import Booking

if TYPE_CHECKING:
    from pdmesh.core.placement.instance import Instance

ADMISSION_S = 1.0  # a request that is not admitted in this time has ended, or gets another plan
BACKLOG_S = 120.0  # an admitted prompt that is not computed in this time is given up
MAX_BOOKINGS = 65_536


@dataclass(slots=True)
class Reservations:
    """Bookings by request id.

    A request has at most one booking on a prefill and one on a decode.
    """

    _prefills: dict[str, Booking] = field(default_factory=dict)
    _decodes: dict[str, Booking] = field(default_factory=dict)
    _order: deque[tuple[float, str]] = field(default_factory=deque)

    def __len__(self) -> int:
        return len(self._prefills) + len(self._decodes)

    def book(self, request_id: str, prefill: Booking, decode: Booking | None, now: float) -> None:
        """Book a plan. A second plan of the same request replaces the first."""
        self.drop(request_id)
        while len(self._order) >= MAX_BOOKINGS:
            self.drop(self._order.popleft()[1])
        self._prefills[request_id] = prefill
        prefill.instance.add_booking(prefill, now)
        if decode is not None:
            self._decodes[request_id] = decode
            decode.instance.add_booking(decode, now)
        self._order.append((now, request_id))

    def admitted(self, instance: Instance, request_ids: Iterable[str], now: float) -> None:
        """Note that the instance has admitted these requests and counts them in its reports."""
        for request_id in request_ids:
            is_decode = instance.is_decode
            bookings = self._decodes if is_decode else self._prefills
            booking = bookings.get(request_id)
            if booking is None or booking.is_admitted:
                continue
            if is_decode:
                del bookings[request_id]
                booking.instance.remove_booking(booking, now)
            else:
                booking.instance.remove_booking(booking, now)
                booking.instance, booking.is_admitted = instance, True
                instance.add_backlog(booking, now)

    def computed(self, request_id: str, now: float) -> Booking | None:
        """Note that the request's prompt is computed. End its booking and return it."""
        booking = self._prefills.pop(request_id, None)
        if booking is not None:
            self._remove(booking, now)
            booking.instance.resume_backlog(now)
        return booking

    def idle(self, instance: Instance, now: float) -> None:
        """End the bookings of an idle instance's admitted prompts.

        Their reports must have been lost.
        """
        for request_id in [
            r for r, b in self._prefills.items() if b.instance is instance and b.is_admitted
        ]:
            self._remove(self._prefills.pop(request_id), now)

    def expire(self, now: float) -> None:
        while self._order and self._order[0][0] < now - ADMISSION_S:
            at, request_id = self._order.popleft()
            for bookings in (self._prefills, self._decodes):
                booking = bookings.get(request_id)
                if booking is None or booking.at != at:
                    continue
                if not booking.is_admitted:
                    del bookings[request_id]
                    booking.instance.remove_booking(booking, now)
        self._expire_backlog(now)

    def _expire_backlog(self, now: float) -> None:
        """Drop prompts that are too old. The oldest ones come first in `_prefills`."""
        while self._prefills:
            request_id, booking = next(iter(self._prefills.items()))
            if booking.at >= now - BACKLOG_S:
                return
            del self._prefills[request_id]
            self._remove(booking, now)

    def drop(self, request_id: str) -> None:
        for bookings in (self._prefills, self._decodes):
            booking = bookings.pop(request_id, None)
            if booking is not None:
                self._remove(booking, booking.at)

    def forget_instance(self, instance: Instance) -> None:
        for bookings in (self._prefills, self._decodes):
            for request_id in [r for r, b in bookings.items() if b.instance is instance]:
                del bookings[request_id]

    def of(self, instance: Instance) -> list[Booking]:
        both = (*self._prefills.values(), *self._decodes.values())
        return [booking for booking in both if booking.instance is instance]

    @staticmethod
    def _remove(booking: Booking, now: float) -> None:
        if booking.is_admitted:
            booking.instance.remove_backlog(booking, now)
        else:
            booking.instance.remove_booking(booking, now)
