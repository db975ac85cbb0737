"""Decides when a load's blocks may be written, and when blocks and landings may be used again.

A load pulls one prompt's KV into landings (ranges of registered memory), and scatters it into the
blocks that its request holds. The leg, a request's stay on one instance, identifies the load. The
blocks are released, or given to the engine for computing, only when the pull has ended and no copy
into them is running. After the pull's end, nothing more is scattered, even if the KV agent still
delivers bytes. A landing is free when the pull has delivered all of its bytes, or when the agent
knows that no late write can reach the landing. But no landing is free while a copy from it into the
blocks may run.

Pulls take turns (S53). A pull whose prompt is still being computed takes no turn, because its KV
comes only as fast as prefill computes it. The load of such a pull is complete when the KV is there
and prefill has drawn token 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from pdmesh.core.flight_recorder import FlightRecorder, recorded
from pdmesh.core.kv.transfer.incoming_events import (
    AgentLandingFreed,
    BoundSilence,
    CancelPull,
    CompleteLoad,
    FirstTokenKnown,
    IncomingEffect,
    IncomingEvent,
    KeepLease,
    LoadCancelled,
    LoadFailure,
    LoadStarted,
    PullEnded,
    PullFellSilent,
    RangeScattered,
    RangeVerified,
    ReleaseBlocks,
    ReportLoad,
    Scatter,
    StartPull,
    StopRenewing,
)
from pdmesh.core.kv.transfer.pull_queue import PullQueue
from pdmesh.core.kv.transfer.receiver_events import FreeLanding
from pdmesh.core.kv.transfer.ticket import PullFailure
from pdmesh.core.model import Tick

MAX_EXPECTED: Final = 4096  # legs whose token 1 came first and whose load has not started
_OVERDUE: Final = LoadFailure(PullFailure.OVERDUE, "its turn did not come in time")


@dataclass(slots=True)
class _Load:
    started: float
    landings: set[int]  # offsets of the ranges that may still be written
    awaits_token: bool
    has_blocks: bool  # the blocks are neither given to the engine nor released yet
    is_begun: bool = False
    is_over: bool = False  # the pull has ended, or will never begin
    num_scattering: int = 0
    failure: LoadFailure | None = None
    is_cancelled: bool = False
    is_landing_free: bool = False
    waits_since: float = math.inf  # when prefill was done and the turn had come

    @property
    def is_settled(self) -> bool:
        """Whether nothing is copied into the blocks any more."""
        return self.is_over and not self.num_scattering


MAX_PULLS: Final = 64  # on one rank at the same time


class IncomingBlocks:
    """One rank's loads, by leg. Only `handle` changes them."""

    def __init__(self, max_pulls: int) -> None:
        self.recorder = FlightRecorder()
        self._queue: PullQueue[int] = PullQueue(max_pulls)
        self._loads: dict[int, _Load] = {}
        self._leg_at: dict[int, int] = {}  # by the offset of each landing range that is not free
        self._expected: dict[int, None] = {}  # legs whose token 1 came before their load

    @property
    def num_waiting(self) -> int:
        return self._queue.num_waiting

    def is_waiting(self, leg: int) -> bool:
        """Whether the leg waits for its turn."""
        return self._queue.is_waiting(leg)

    @recorded
    def handle(self, event: IncomingEvent, now: float) -> list[IncomingEffect]:
        match event:
            case LoadStarted():
                return self._on_started(event, now)
            case FirstTokenKnown(leg):
                return self._on_first_token(leg, now)
            case RangeVerified(leg):
                return self._on_verified(leg)
            case RangeScattered(leg):
                self._loads[leg].num_scattering -= 1
                return self._settle(leg, now)
            case PullFellSilent(leg):
                return self._begin_all(self._queue.fell_silent(leg), now)
            case PullEnded():
                return self._on_pull_ended(event, now)
            case LoadCancelled(leg):
                return self._on_cancelled(leg, now)
            case AgentLandingFreed(offset):
                return self._on_landing_freed(offset)
            case Tick():
                return self._on_tick(now)

    def check_invariants(self) -> None:
        self._queue.check_invariants()
        for leg, load in self._loads.items():
            assert load.is_begun != self._queue.is_waiting(leg), "neither waits nor pulls"
            assert load.num_scattering >= 0
            assert load.is_settled or not load.is_landing_free
            assert load.has_blocks or not load.is_landing_free, "over, and not forgotten"
            assert not load.is_landing_free or not load.landings
            assert all(self._leg_at[offset] == leg for offset in load.landings)
        assert sum(len(load.landings) for load in self._loads.values()) == len(self._leg_at)

    # -- until the pull ends ----------------------------------------------------------------------

    def _on_started(self, event: LoadStarted, now: float) -> list[IncomingEffect]:
        leg = event.leg
        if leg in self._loads:
            raise ValueError(f"leg {leg} is already loading")
        is_known = leg in self._expected
        self._expected.pop(leg, None)
        awaits_token = event.is_early and not is_known
        self._loads[leg] = _Load(now, set(event.landings), awaits_token, event.has_blocks)
        self._leg_at.update(dict.fromkeys(event.landings, leg))
        if event.source is None:
            return self._begin_all([leg], now)
        begun = self._queue.add(leg, event.num_bytes, event.source, now + event.timeout_s)
        keep: list[IncomingEffect] = [KeepLease(leg)] if self._queue.is_waiting(leg) else []
        return self._begin_all(begun, now) + keep

    def _begin_all(self, legs: Iterable[int], now: float) -> list[IncomingEffect]:
        effects: list[IncomingEffect] = []
        for leg in legs:
            load = self._loads[leg]
            load.is_begun = True
            if not load.awaits_token:
                load.waits_since = now
            effects.append(StartPull(leg, load.awaits_token))
        return effects

    def _on_first_token(self, leg: int, now: float) -> list[IncomingEffect]:
        load = self._loads.get(leg)
        if load is None:
            self._expected[leg] = None
            if len(self._expected) > MAX_EXPECTED:
                del self._expected[next(iter(self._expected))]
            return []
        if not load.awaits_token:
            return []
        load.awaits_token = False
        load.waits_since = now
        return self._settle_blocks(leg) if load.is_settled else [BoundSilence(leg)]

    def _on_verified(self, leg: int) -> list[IncomingEffect]:
        load = self._loads.get(leg)
        if load is None or not load.has_blocks or load.is_over or load.is_cancelled:
            return []  # the KV agent has not heard of the load's end yet
        load.num_scattering += 1
        return [Scatter(leg)]

    # -- the end ----------------------------------------------------------------------------------

    def _on_pull_ended(self, event: PullEnded, now: float) -> list[IncomingEffect]:
        load = self._loads[event.leg]
        assert load.is_begun, "its pull was not asked for"
        assert not load.is_over, "it ended before"
        load.is_over, load.failure = True, event.failure
        self._drop_landings(load, event.landings)
        return self._settle(event.leg, now)

    def _settle(self, leg: int, now: float) -> list[IncomingEffect]:
        """End the load if its pull and all copies have ended. The next pull gets the turn."""
        if not self._loads[leg].is_settled:
            return []
        return self._end(leg, now) + self._begin_all(self._queue.end(leg), now)

    def _end(self, leg: int, now: float) -> list[IncomingEffect]:
        load = self._loads[leg]
        report: list[IncomingEffect] = []
        if load.has_blocks and not load.is_cancelled:
            waited_s = max(0.0, now - load.waits_since)
            report = [ReportLoad(leg, load.failure, now - load.started, waited_s)]
        return report + self._settle_blocks(leg) + self._free_landing(leg)

    def _settle_blocks(self, leg: int) -> list[IncomingEffect]:
        load = self._loads[leg]
        is_useless = load.is_cancelled or load.failure is not None
        if not load.has_blocks or (load.awaits_token and not is_useless):
            return []
        load.has_blocks = False
        self._forget_if_over(leg)
        return [ReleaseBlocks(leg) if is_useless else CompleteLoad(leg)]

    def _free_landing(self, leg: int) -> list[IncomingEffect]:
        load = self._loads.get(leg)
        if load is None or load.landings or not load.is_settled:
            return []
        load.is_landing_free = True
        self._forget_if_over(leg)
        return [FreeLanding(leg)]

    def _forget_if_over(self, leg: int) -> None:
        load = self._loads[leg]
        if load.is_landing_free and not load.has_blocks:
            del self._loads[leg]

    def _on_landing_freed(self, offset: int) -> list[IncomingEffect]:
        leg = self._leg_at.get(offset)
        if leg is None:
            return []
        self._drop_landings(self._loads[leg], [offset])
        return self._free_landing(leg)

    def _drop_landings(self, load: _Load, offsets: Iterable[int]) -> None:
        for offset in offsets:
            load.landings.discard(offset)
            self._leg_at.pop(offset, None)

    def _on_cancelled(self, leg: int, now: float) -> list[IncomingEffect]:
        self._expected.pop(leg, None)
        load = self._loads.get(leg)
        if load is None or load.is_cancelled or not load.has_blocks:
            return []
        load.is_cancelled = True
        if not load.is_begun:
            begun = self._queue.end(leg)
            return self._leave_queue(leg, now) + self._begin_all(begun, now)
        if load.is_settled:  # the load only waits for token 1
            return self._settle_blocks(leg)
        return [] if load.is_over else [CancelPull(leg)]

    def _leave_queue(self, leg: int, now: float) -> list[IncomingEffect]:
        """End a load whose turn has not come, so that no pull was started."""
        load = self._loads[leg]
        load.is_over = True
        self._drop_landings(load, list(load.landings))
        return [StopRenewing(leg), *self._end(leg, now)]

    def _on_tick(self, now: float) -> list[IncomingEffect]:
        dropped, begun = self._queue.drop_overdue(now)
        effects: list[IncomingEffect] = []
        for leg in dropped:
            self._loads[leg].failure = _OVERDUE
            effects += self._leave_queue(leg, now)
        return effects + self._begin_all(begun, now)
