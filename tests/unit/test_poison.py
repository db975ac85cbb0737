"""What instances died of is remembered, for a while, and within bounds (F38)."""

from __future__ import annotations

import itertools

import pytest

from pdmesh.core.poison import PoisonBook
from pdmesh.core.request import Request
from pdmesh.core.request_types import (
    AskPlan,
    Candidate,
    Complete,
    DecodeTokens,
    Effect,
    Fail,
    FirstToken,
    LegAccepted,
    LegFailed,
    LegLost,
    PlanReceived,
    RequestLimits,
    SendPrefill,
    Submitted,
    Tick,
)
from pdmesh.core.retry_budget import RetryBudget
from pdmesh.core.slo import ScenarioSlo, Slos
from pdmesh.errors import EngineFailed, Overloaded, PoisonRequest

FUSIONS = [Candidate(f"f{i}", 1, "g", is_local=True) for i in range(4)]


@pytest.mark.fault("F38")
def test_two_deaths_make_a_poison_for_ten_minutes() -> None:
    book = PoisonBook(remember_s=600)
    book.add(b"x", 1, now=0.0)
    assert not book.is_poison(b"x", 1.0)
    book.add(b"x", 1, now=10.0)
    assert book.is_poison(b"x", 609.9)
    assert not book.is_poison(b"x", 610.0)
    assert len(book) == 0


@pytest.mark.fault("F38")
def test_an_answer_clears_it_and_the_oldest_is_forgotten() -> None:
    book = PoisonBook(max_entries=2)
    for digest in (b"a", b"b", b"c"):
        book.add(digest, 2, now=0.0)
    assert [book.is_poison(d, 1.0) for d in (b"a", b"b", b"c")] == [False, True, True]
    book.clear(b"b")
    assert not book.is_poison(b"b", 1.0)
    book.clear(b"never seen")


class Driven:
    """A request on fusion instances, led to its decoding on one of them."""

    def __init__(self, budget: RetryBudget | None = None, **limits: float) -> None:
        keys = itertools.count(1)
        self.now = 0.0
        self.key = 0
        self.plan = 0
        self.request = Request(
            1000,
            limits=RequestLimits(**limits),  # type: ignore[arg-type]  # ints are floats here
            budget=budget or RetryBudget(),
            next_key=lambda: next(keys),
        )
        self.feed(Submitted())

    def feed(self, event: object) -> list[Effect]:
        effects = self.request.handle(event, self.now)  # type: ignore[arg-type]  # any of them
        for effect in effects:
            if isinstance(effect, AskPlan):
                self.plan = effect.plan
            elif isinstance(effect, SendPrefill):
                self.key = effect.key
        self.request.check_invariants()
        return effects

    def offer(self) -> None:
        self.feed(PlanReceived(self.plan, FUSIONS, []))

    def decode(self, num_tokens: int) -> None:
        self.offer()
        self.feed(LegAccepted(self.key))
        self.feed(FirstToken(self.key, 7))
        self.feed(DecodeTokens(self.key, [7] * num_tokens))

    @property
    def error(self) -> object:
        outcome = self.request.outcome
        return type(outcome.error) if isinstance(outcome, Fail) else None


@pytest.mark.fault("F38")
@pytest.mark.parametrize("death", ["lost", "engine died"])
def test_a_request_whose_instances_die_at_once_stops_after_two(death: str) -> None:
    driven = Driven()
    for _ in range(2):
        assert driven.error is None
        driven.decode(num_tokens=3)
        if death == "lost":
            driven.feed(LegLost(driven.key))
        else:
            driven.feed(LegFailed(driven.key, EngineFailed("x", reason="ENGINE_DIED")))
    assert driven.error is PoisonRequest
    assert driven.request.num_deaths == 2


@pytest.mark.fault("F38")
def test_instances_that_say_nothing_are_not_held_against_a_request() -> None:
    driven = Driven()
    for _ in range(3):
        driven.decode(num_tokens=3)
        driven.now += 6.0
        driven.feed(Tick())
    assert driven.request.num_migrations == 3
    assert driven.request.num_deaths == 0
    assert driven.error is None


@pytest.mark.fault("F38", "F7")
def test_a_request_that_went_well_for_a_while_is_innocent_of_the_death() -> None:
    driven = Driven()
    for _ in range(3):
        driven.decode(num_tokens=40)
        driven.feed(LegLost(driven.key))
    assert driven.request.num_deaths == 0
    driven.decode(num_tokens=1000)
    driven.feed(Tick())
    assert driven.error is None


@pytest.mark.fault("F38")
def test_failures_that_are_no_death_are_bounded_by_the_budget_all_requests_share() -> None:
    budget = RetryBudget(ratio=0.0, reserve=5.0)
    requests = [Driven(budget) for _ in range(4)]
    num_moves = 0
    for driven in requests:
        while driven.error is None:
            driven.offer()
            driven.feed(LegFailed(driven.key, EngineFailed("x", reason="KV_TRANSFER_FAILED")))
        num_moves += driven.request.num_migrations
        assert driven.error is EngineFailed
    assert num_moves == 5


@pytest.mark.req("S44")
def test_an_instance_that_does_not_answer_does_not_hold_a_request_beyond_its_deadline() -> None:
    driven = Driven(ttft_s=0.5, answer_s=3.0)
    driven.offer()
    assert driven.request.wake_at == 0.5
    driven.now = 0.5
    driven.feed(Tick())
    assert driven.error is Overloaded


@pytest.mark.req("S9")
def test_an_accepted_prefill_is_never_ended_for_being_late() -> None:
    driven = Driven(ttft_s=0.5)
    driven.offer()
    driven.feed(LegAccepted(driven.key))
    driven.now = 5.0
    assert driven.feed(Tick()) == []
    driven.feed(FirstToken(driven.key, 7, finish_reason="stop"))
    assert isinstance(driven.request.outcome, Complete)


@pytest.mark.req("S9")
def test_the_deadline_is_by_scenario_and_by_length() -> None:
    limits = RequestLimits(ttft_s=10.0)
    slos = Slos(limits, 0.0, {"search": ScenarioSlo(0.5, 0.25, "busy")})
    assert slos.limits_for("", 8000) is limits, "free where nothing is configured"
    assert slos.limits_for("search", 2000).ttft_s == 1.0
    assert Slos(limits, 0.1).limits_for("any", 5000).ttft_s == 10.5
    assert (slos.default_text("search"), slos.default_text("any")) == ("busy", None)
    assert (slos.label("search"), slos.label("x" * 200)) == ("search", "default")
