"""The life of a batch of pooling inputs, which may be refused, lost, late or answered."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pdmesh.core.model import PeerId, Tick
from pdmesh.core.pooling.batch_life import (
    Abort,
    Answered,
    BatchAccepted,
    BatchEvicted,
    BatchFailed,
    BatchLife,
    BatchLost,
    BatchRejected,
    Begun,
    Done,
    Effect,
    Event,
    GiveBatchUp,
    PlaceFreed,
    Rank,
    Ranked,
    SendBatch,
    Unsent,
    WaitForPlace,
)
from pdmesh.core.request.events import RequestLimits
from pdmesh.core.request.retry_budget import RetryBudget
from pdmesh.errors import (
    DeadlineExceeded,
    EngineFailed,
    InstanceLost,
    InvalidRequest,
    MeshError,
    NoInstance,
    Overloaded,
    PoisonRequest,
)

A, B, C = (PeerId(name, 1) for name in "abc")
LIMITS = RequestLimits(deadline_s=60, ttft_s=5, answer_s=1, retry_s=0.25, max_migrations=3)


class Batch:
    """Drives a batch with its own clock. The keys of the attempts are 1, 2 and so on."""

    def __init__(
        self, *instances: PeerId, limits: RequestLimits = LIMITS, num_retries: float = 100.0
    ) -> None:
        self.budget = RetryBudget(reserve=num_retries)
        self.life = BatchLife(limits, self.budget, began_at=0.0)
        self.instances: Sequence[PeerId] = instances
        self.now, self.key = 0.0, 0
        self.effects: list[Effect] = []
        self.tell(Begun())

    def tell(self, event: Event) -> list[Effect]:
        """The effects of one event. A request for a ranking is answered at once."""
        found: list[Effect] = []
        left = self.life.handle(event, self.now)
        while left:
            effect = left.pop(0)
            found.append(effect)
            if isinstance(effect, Rank):
                able = [i for i in self.instances if i not in effect.excluded]
                left += self.life.handle(Ranked(able), self.now)
            elif isinstance(effect, SendBatch):
                self.key += 1
                self.life.sent(self.key)
            self.life.check_invariants()
        self.effects += found
        return found

    def wait(self, seconds: float) -> list[Effect]:
        """Let the time pass, with a tick whenever the batch's timer would fire."""
        until, found = self.now + seconds, list[Effect]()
        while not self.life.is_over and self.life.wake_at <= until:
            self.now = max(self.now, self.life.wake_at)
            found += self.tell(Tick())
        self.now = until
        return found

    @property
    def asked(self) -> list[PeerId]:
        return [e.instance for e in self.effects if isinstance(e, SendBatch)]

    @property
    def error(self) -> MeshError | None:
        return next((e.error for e in self.effects if isinstance(e, GiveBatchUp)), None)


def test_an_answer_ends_a_batch_even_if_no_acceptance_came_before() -> None:
    batch = Batch(A, B)
    assert batch.tell(Answered(1)) == [Done()]
    assert batch.asked == [A]
    assert batch.tell(BatchLost(1)) == []


def test_a_busy_instance_is_followed_by_the_next() -> None:
    batch = Batch(A, B)
    batch.tell(BatchRejected(1))
    assert batch.asked == [A, B]
    assert batch.life.num_rejections == 1


def test_if_all_instances_are_busy_a_batch_waits_and_is_called_when_a_slot_is_free() -> None:
    batch = Batch(A, B)
    batch.tell(BatchRejected(1))
    assert batch.tell(BatchRejected(2)) == [WaitForPlace((A, B), 5.0)]
    batch.now = 0.1
    batch.tell(PlaceFreed("b"))
    assert batch.asked == [A, B, B]


def test_a_batch_that_is_not_called_asks_again_ever_less_often_until_its_deadline() -> None:
    batch = Batch(A)
    batch.tell(BatchRejected(1))
    times: list[float] = []
    while not batch.life.is_over:
        batch.now = batch.life.wake_at
        batch.tell(Tick())
        if not batch.life.is_over:
            times.append(batch.now)
            batch.tell(BatchRejected(batch.key))
    assert times == [0.25, 0.75, 1.75, 3.75]
    assert batch.now == 5.0
    assert isinstance(batch.error, Overloaded)


def test_a_batch_without_any_instance_waits_and_then_fails_with_that_reason() -> None:
    batch = Batch()
    assert batch.effects[-1] == WaitForPlace((), 5.0)
    batch.wait(5.0)
    assert isinstance(batch.error, NoInstance)


def test_an_instance_that_appears_while_a_batch_waits_is_asked() -> None:
    batch = Batch()
    batch.instances = (A,)
    batch.wait(0.25)
    assert batch.asked == [A]


def test_a_full_waiting_room_refuses_a_batch() -> None:
    batch = Batch(A)
    batch.tell(BatchRejected(1))
    batch.tell(BatchEvicted())
    assert isinstance(batch.error, Overloaded)


def test_a_final_refusal_excludes_the_instance() -> None:
    batch = Batch(A, B)
    batch.tell(BatchRejected(1, is_final=True))
    batch.tell(BatchRejected(2))
    batch.now = 0.25
    batch.tell(Tick())
    assert batch.asked == [A, B, B]


def test_an_input_that_is_too_long_is_the_clients_mistake() -> None:
    batch = Batch(A, B)
    batch.tell(BatchRejected(1, is_too_long=True))
    assert isinstance(batch.error, InvalidRequest)


def test_a_lost_instance_costs_a_run_on_another() -> None:
    batch = Batch(A, B)
    batch.tell(BatchAccepted(1))
    batch.tell(BatchLost(1))
    assert batch.asked == [A, B]
    assert list(batch.life.victims) == [("a", 1)]
    assert batch.tell(Answered(2)) == [Done()]


def test_inputs_that_killed_two_instances_are_given_up() -> None:
    batch = Batch(A, B, C)
    batch.tell(BatchLost(1))
    batch.tell(BatchLost(2))
    assert isinstance(batch.error, PoisonRequest)
    assert batch.asked == [A, B]


def died(key: int) -> BatchFailed:
    return BatchFailed(key, EngineFailed("x", reason="ENGINE_DIED"), is_retryable=True)


def test_the_death_of_an_engine_counts_as_the_death_of_its_instance() -> None:
    """The instance reports the engine's death before its session breaks."""
    batch = Batch(A, B, C)
    batch.tell(died(1))
    batch.tell(died(2))
    assert isinstance(batch.error, PoisonRequest)
    assert batch.asked == [A, B]
    assert list(batch.life.victims) == [("a", 1), ("b", 1)]


def test_an_instance_whose_session_breaks_twice_died_once() -> None:
    batch = Batch(A)
    batch.tell(BatchLost(1))
    batch.wait(0.25)
    batch.tell(BatchLost(2))
    assert batch.error is None
    assert list(batch.life.victims) == [("a", 1)]


@pytest.mark.parametrize(
    ("news", "error"),
    [(BatchLost(1), InstanceLost), (BatchFailed(1, EngineFailed("no"), True), EngineFailed)],
    ids=["lost", "failed"],
)
def test_without_a_budget_for_retries_a_batch_is_not_tried_again(
    news: Event, error: type[MeshError]
) -> None:
    batch = Batch(A, B, num_retries=0.5)
    batch.tell(news)
    assert isinstance(batch.error, error)
    assert batch.asked == [A]


def test_only_a_further_try_costs_a_retry() -> None:
    batch = Batch(A, B, num_retries=1.0)
    batch.tell(BatchFailed(1, InvalidRequest("no"), is_retryable=False))
    assert batch.budget.spend()


MANY = tuple(PeerId(f"m{number:02}", 1) for number in range(20))


def refuse_round(batch: Batch) -> list[PeerId]:
    """Let all candidates of the last ranking reject the batch. Returns these candidates."""
    before = len(batch.asked)
    while not batch.life.is_over and not isinstance(batch.effects[-1], WaitForPlace):
        batch.tell(BatchRejected(batch.key))
    return batch.asked[before - 1 :]


def test_a_slot_of_an_instance_that_was_not_asked_wakes_it_and_is_used() -> None:
    batch = Batch(*MANY)
    assert refuse_round(batch) == list(MANY[: LIMITS.max_candidates])
    assert isinstance(batch.effects[-1], WaitForPlace)
    assert set(batch.effects[-1].instances) == set(MANY)
    batch.tell(PlaceFreed("m19"))
    assert batch.asked[-1] == MANY[19]


def test_each_round_asks_instances_that_were_not_asked_before() -> None:
    batch = Batch(*MANY)
    refuse_round(batch)
    for _ in range(2):
        batch.now = batch.life.wake_at
        batch.tell(Tick())
        refuse_round(batch)
    assert set(batch.asked) == set(MANY)


def test_a_failure_goes_elsewhere_until_all_tries_are_used() -> None:
    batch = Batch(A, B)
    error = EngineFailed("no")
    for key in range(1, LIMITS.max_migrations + 2):
        batch.tell(BatchFailed(key, error, is_retryable=True))
        while batch.key == key and not batch.life.is_over:
            batch.now = batch.life.wake_at
            batch.tell(Tick())
    assert batch.error is error
    assert len(batch.asked) == LIMITS.max_migrations + 1


def test_a_failure_that_would_recur_on_any_instance_ends_the_batch_at_once() -> None:
    batch = Batch(A, B)
    error = InvalidRequest("no")
    assert batch.tell(BatchFailed(1, error, is_retryable=False)) == [GiveBatchUp(error)]


def test_an_instance_that_does_not_answer_is_given_up_for_another() -> None:
    batch = Batch(A, B)
    assert batch.wait(1.0)[:1] == [Abort()]
    assert batch.asked == [A, B]
    assert batch.tell(Answered(1)) == []
    assert batch.tell(Answered(2)) == [Done()]


def test_an_accepted_batch_has_time_until_the_deadline() -> None:
    batch = Batch(A, B)
    batch.tell(BatchAccepted(1))
    assert batch.wait(59.0) == []
    batch.wait(1.0)
    assert isinstance(batch.error, DeadlineExceeded)
    assert Abort() in batch.effects


def test_an_unreachable_instance_is_passed_over() -> None:
    batch = Batch(A, B)
    batch.tell(Unsent())
    assert batch.asked == [A, B]


def test_an_instance_that_failed_is_asked_again_if_all_others_are_gone() -> None:
    batch = Batch(A)
    batch.tell(BatchFailed(1, EngineFailed("no"), is_retryable=True))
    batch.wait(0.25)
    assert batch.asked == [A, A]


@pytest.mark.parametrize("event", [BatchAccepted(7), BatchRejected(7), Answered(7), BatchLost(7)])
def test_events_of_another_attempt_change_nothing(event: Event) -> None:
    batch = Batch(A, B)
    assert batch.tell(event) == []
    assert batch.tell(Answered(1)) == [Done()]
