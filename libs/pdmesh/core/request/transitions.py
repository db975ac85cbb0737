"""The table of a request's phases: which events each phase handles, and which phases may follow.

An event that is not in the table is late or impossible. A late event belongs to a leg or a request
that has ended since the event was sent, so it changes nothing. No order of messages can lead to an
impossible event, so `Request.handle` raises `IllegalEvent` for it. An event that could be either
counts as late. A leg is a request's stay on one instance, and a ticket is the right to pull a
prefill's KV. An early decode pulls this KV while the prefill still computes it. `python -m
tools.request_states` makes docs/request-states.md from this table.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

from pdmesh.core.model import Tick
from pdmesh.core.request.events import (
    ClientGone,
    DecodeTokens,
    EngineUnknown,
    EngineWorked,
    FirstToken,
    KvAdvanced,
    LegAccepted,
    LegFailed,
    LegFinished,
    LegKvReceived,
    LegLost,
    LegRejected,
    PlanFailed,
    PlanReceived,
    SlotFreed,
    StopMatched,
    Submitted,
    WaitRefused,
)


class RequestPhase(StrEnum):
    """The phases of a request.

    A phase is looked up for each event. It is a StrEnum because the hash of a string is fast.
    """

    NEW = "new"
    PLANNING = "planning"
    # Every offer was rejected or a leg was lost, and no other instance is available.
    WAITING_PLAN = "waiting_plan"
    PREFILL_OFFERED = "prefill_offered"
    WAITING_PREFILL = "waiting_prefill"  # in the waiting room
    PREFILLING = "prefilling"
    DECODE_OFFERED = "decode_offered"
    WAITING_DECODE = "waiting_decode"  # in the waiting room, holding a ticket
    DECODING = "decoding"
    ENDED = "ended"


NEW, PLANNING, WAITING_PLAN = RequestPhase.NEW, RequestPhase.PLANNING, RequestPhase.WAITING_PLAN
PREFILL_OFFERED, WAITING_PREFILL = RequestPhase.PREFILL_OFFERED, RequestPhase.WAITING_PREFILL
PREFILLING, DECODE_OFFERED = RequestPhase.PREFILLING, RequestPhase.DECODE_OFFERED
WAITING_DECODE, DECODING = RequestPhase.WAITING_DECODE, RequestPhase.DECODING
ENDED = RequestPhase.ENDED

HAS_LEG: Final = frozenset({PREFILL_OFFERED, PREFILLING, DECODE_OFFERED, DECODING})
WAITING: Final = frozenset({WAITING_PREFILL, WAITING_DECODE})
# No prefill has accepted the request in its current attempt.
UNPLACED: Final = frozenset({PLANNING, WAITING_PLAN, PREFILL_OFFERED, WAITING_PREFILL})

Row = Mapping[type, frozenset[RequestPhase]]


def _to(*phases: RequestPhase) -> frozenset[RequestPhase]:
    return frozenset(phases)


# If a leg or its KV is lost, the request asks for a new plan, or ends if nothing is left to try.
_LOST: Final = _to(PLANNING, ENDED)
_LOSSES: Final[Row] = {LegFailed: _LOST, LegLost: _LOST}
_ALWAYS: Final[Row] = {ClientGone: _to(ENDED), StopMatched: _to(ENDED)}

# The events of the active leg, the planner, the waiting room, the client and the clock.
TRANSITIONS: Final[Mapping[RequestPhase, Row]] = {
    NEW: {
        Submitted: _to(PLANNING, ENDED),
        ClientGone: _to(ENDED),
    },
    PLANNING: {
        PlanReceived: _to(PLANNING, WAITING_PLAN, PREFILL_OFFERED, ENDED),
        PlanFailed: _to(PLANNING, WAITING_PLAN, ENDED),
        Tick: _to(PLANNING, ENDED),
        **_ALWAYS,
    },
    WAITING_PLAN: {
        Tick: _to(WAITING_PLAN, PLANNING, ENDED),
        **_ALWAYS,
    },
    PREFILL_OFFERED: {
        LegAccepted: _to(PREFILLING),
        LegRejected: _to(PREFILL_OFFERED, WAITING_PREFILL, PLANNING, ENDED),
        FirstToken: _to(DECODE_OFFERED, DECODING, PLANNING, ENDED),
        Tick: _to(PREFILL_OFFERED, PLANNING, ENDED),
        **_LOSSES,
        **_ALWAYS,
    },
    WAITING_PREFILL: {
        SlotFreed: _to(WAITING_PREFILL, PREFILL_OFFERED, ENDED),
        WaitRefused: _to(ENDED),
        Tick: _to(WAITING_PREFILL, PLANNING, ENDED),
        **_ALWAYS,
    },
    PREFILLING: {
        FirstToken: _to(DECODE_OFFERED, DECODING, PLANNING, ENDED),
        EngineWorked: _to(PREFILLING),
        EngineUnknown: _to(PREFILLING),
        Tick: _to(PREFILLING, PLANNING, ENDED),
        **_LOSSES,
        **_ALWAYS,
    },
    DECODE_OFFERED: {
        LegAccepted: _to(DECODING),
        LegRejected: _to(DECODE_OFFERED, WAITING_DECODE, PLANNING, ENDED),
        KvAdvanced: _to(DECODING),
        LegKvReceived: _to(DECODING),
        DecodeTokens: _to(DECODING),
        LegFinished: _to(ENDED),
        Tick: _to(DECODE_OFFERED, PLANNING, ENDED),
        **_LOSSES,
        **_ALWAYS,
    },
    WAITING_DECODE: {
        SlotFreed: _to(WAITING_DECODE, DECODE_OFFERED),
        WaitRefused: _to(ENDED),
        Tick: _to(WAITING_DECODE, DECODE_OFFERED, PLANNING, ENDED),
        **_ALWAYS,
    },
    DECODING: {
        KvAdvanced: _to(DECODING),
        LegKvReceived: _to(DECODING),
        DecodeTokens: _to(DECODING),
        EngineWorked: _to(DECODING),
        LegFinished: _to(ENDED),
        Tick: _to(DECODING, PLANNING, ENDED),
        **_LOSSES,
        **_ALWAYS,
    },
    ENDED: {},
}

# The events of legs beside the active one: the leg of an early decode, and of the ticket's holder.
BESIDE: Final[Mapping[RequestPhase, Row]] = {
    **{phase: {} for phase in RequestPhase},
    PREFILLING: {
        LegAccepted: _to(PREFILLING),
        KvAdvanced: _to(PREFILLING),
        LegKvReceived: _to(PREFILLING),
        LegRejected: _to(PREFILLING, PLANNING, ENDED),
        LegFailed: _to(PREFILLING, PLANNING, ENDED),
        LegLost: _to(PREFILLING, PLANNING, ENDED),
    },
    DECODE_OFFERED: {LegFailed: _to(DECODE_OFFERED), LegLost: _to(DECODE_OFFERED)},
    WAITING_DECODE: _LOSSES,
    DECODING: {LegFailed: _to(DECODING), LegLost: _to(DECODING)},
}

# Events that only decodes send, and never for a prefill leg.
_DECODES_WORDS: Final = frozenset({KvAdvanced, LegKvReceived, DecodeTokens, LegFinished})
# `Submitted` comes once, before all other events. A leg never sends an event of the other role, and
# no plan arrives for which the request has not asked.
IMPOSSIBLE: Final[Mapping[RequestPhase, frozenset[type]]] = {
    **{phase: frozenset({Submitted}) for phase in RequestPhase},
    NEW: frozenset({PlanReceived, PlanFailed, SlotFreed, WaitRefused, StopMatched}),
    PREFILL_OFFERED: _DECODES_WORDS | {Submitted},
    PREFILLING: _DECODES_WORDS | {Submitted},
    DECODE_OFFERED: frozenset({FirstToken, Submitted}),
    DECODING: frozenset({FirstToken, Submitted}),
    ENDED: frozenset(),
}
