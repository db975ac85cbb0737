"""Drives the core of one request (`core/request/machine.py`) by hand, for unit tests.

`Driven` feeds events to the core, and keeps its last effects.
"""

from __future__ import annotations

import itertools

from pdmesh.core.request.events import (
    AskPlan,
    Candidate,
    DecodeTokens,
    Effect,
    Event,
    Fail,
    FirstToken,
    LegAccepted,
    PlanReceived,
    RequestLimits,
    SendPrefill,
    Submitted,
)
from pdmesh.core.request.machine import Request
from pdmesh.core.request.retry_budget import RetryBudget

FUSIONS = [Candidate(f"f{i}", 1, "g", is_local=True) for i in range(4)]


def new_request(budget: RetryBudget | None = None, **limits: float) -> Request:
    keys = itertools.count(1)
    return Request(
        1000,
        limits=RequestLimits(**limits),  # type: ignore[arg-type]  # ints are floats here
        budget=budget or RetryBudget(),
        next_key=lambda: next(keys),
    )


class Driven:
    """A request whose only instances are of the role fusion, which do both phases."""

    def __init__(self, budget: RetryBudget | None = None, **limits: float) -> None:
        self.now = 0.0
        self.key = 0
        self.plan = 0
        self.excluded: tuple[str, ...] = ()
        self.request = new_request(budget, **limits)
        self.feed(Submitted())

    def feed(self, event: Event) -> list[Effect]:
        effects = self.request.handle(event, self.now)
        for effect in effects:
            if isinstance(effect, AskPlan):
                self.plan, self.excluded = effect.plan, effect.excluded
            elif isinstance(effect, SendPrefill):
                self.key = effect.key
        self.request.check_invariants()
        return effects

    def offer(self) -> None:
        """Answer the request for a plan with all instances that the core does not exclude."""
        left = [c for c in FUSIONS if c.instance_id not in self.excluded]
        self.feed(PlanReceived(self.plan, left, []))

    def decode(self, num_tokens: int) -> None:
        self.offer()
        self.feed(LegAccepted(self.key))
        self.feed(FirstToken(self.key, 7))
        self.feed(DecodeTokens(self.key, [7] * num_tokens))

    @property
    def error(self) -> object:
        outcome = self.request.outcome
        return type(outcome.error) if isinstance(outcome, Fail) else None
