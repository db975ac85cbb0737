"""Decides from sequence numbers whether an event is new, repeated, late, or follows a lost one."""

from __future__ import annotations

import enum
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

from pdmesh.events.v1.events_pb2 import Header

_MAX_PUBLISHERS: Final = 65_536
_RETIRED_PER_PUBLISHER: Final = 4


class EventOrder(enum.Enum):
    """The result of comparing an event's number with the publisher's earlier numbers."""

    NEW = "new"
    STALE = "stale"  # repeated, late, or of an earlier incarnation
    GAP = "gap"  # new, but earlier events are lost, so the receiver should fetch a snapshot


@dataclass(slots=True)
class _Publisher:
    incarnation: int
    sequence: int
    retired: list[int] = field(default_factory=list)


class SequenceGate:
    """Compares each event's number with the last number of the same publisher.

    One gate serves one kind of subject. After a GAP, the numbering continues from that event. The
    first event received from an incarnation is NEW if it is number one, and otherwise a GAP. The
    gate keeps at most 65,536 publishers. It drops the publisher that has been silent longest.
    """

    def __init__(self) -> None:
        self._publishers: OrderedDict[str, _Publisher] = OrderedDict()

    def admit(self, header: Header) -> EventOrder:
        known = self._publishers.get(header.publisher_id)
        if known is None:
            return self._start(header, [])
        if header.incarnation != known.incarnation:
            if header.incarnation in known.retired:
                return EventOrder.STALE
            retired = [*known.retired, known.incarnation][-_RETIRED_PER_PUBLISHER:]
            return self._start(header, retired)
        if header.sequence <= known.sequence:
            return EventOrder.STALE
        is_next = header.sequence == known.sequence + 1
        known.sequence = header.sequence
        self._publishers.move_to_end(header.publisher_id)
        return EventOrder.NEW if is_next else EventOrder.GAP

    def forget(self, publisher_id: str) -> None:
        self._publishers.pop(publisher_id, None)

    def _start(self, header: Header, retired: list[int]) -> EventOrder:
        self._publishers[header.publisher_id] = _Publisher(
            header.incarnation, header.sequence, retired
        )
        self._publishers.move_to_end(header.publisher_id)
        if len(self._publishers) > _MAX_PUBLISHERS:
            self._publishers.popitem(last=False)
        return EventOrder.NEW if header.sequence == 1 else EventOrder.GAP
