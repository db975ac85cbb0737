"""The UCX endpoints of two workers stay in step, even if hellos get no answer or cross each other.

UCX pairs the endpoints of two workers in the order in which they are made. A turn is the number of
an endpoint in that order.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from pdmesh.kv.transport.ucx_endpoints import MAX_SKIPPED, MAX_SPARE, PeerEndpoints

HERE, THERE = b"here", b"there"


@dataclass(eq=False)
class Raw:
    """Stands in for UCX's endpoint."""

    address: bytes
    is_closed: bool = False

    def close_blocking(self, period: int, max_attempts: int) -> None:
        self.is_closed = True

    def remove_close_callback(self) -> None: ...


@dataclass
class Worker:
    own: bytes
    made: list[Raw] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.endpoints = PeerEndpoints(self.own, self._make)

    def _make(self, address: bytes) -> Raw:
        self.made.append(Raw(address))
        return self.made[-1]

    @property
    def num_open(self) -> int:
        return sum(not raw.is_closed for raw in self.made)


def test_each_peer_has_its_own_turns() -> None:
    worker = Worker(HERE)
    assert [worker.endpoints.next(THERE).turn for _ in range(3)] == [0, 1, 2]
    assert worker.endpoints.next(b"another").turn == 0


def test_the_answer_is_on_the_turn_of_the_hello_and_skipped_endpoints_are_closed() -> None:
    worker = Worker(HERE)
    answer = worker.endpoints.answering(THERE, 3)
    assert answer.turn == 3
    assert [raw.is_closed for raw in worker.made] == [True, True, True, False]
    assert answer.raw is worker.made[-1]
    assert worker.endpoints.next(THERE).turn == 4


def test_if_the_turn_of_a_hello_is_over_the_answer_takes_the_next_and_the_asker_follows() -> None:
    here, there = Worker(HERE), Worker(THERE)
    for _ in range(5):
        there.endpoints.next(HERE)
    asked = here.endpoints.next(THERE)
    answer = there.endpoints.answering(HERE, asked.turn)
    assert answer.turn == 5
    assert here.endpoints.follow(THERE, asked, answer.turn).turn == 5
    assert here.endpoints.num_made(THERE) == there.endpoints.num_made(HERE) == 6


def test_an_endpoint_that_was_left_for_a_later_turn_still_answers_a_hello_that_crossed() -> None:
    worker = Worker(HERE)
    asked = worker.endpoints.next(THERE)
    assert worker.endpoints.follow(THERE, asked, 1).turn == 1
    assert worker.endpoints.answering(THERE, 0) is asked
    assert worker.endpoints.answering(THERE, 0).turn == 2, "the spare endpoint is used once"


def test_an_endpoint_is_kept_if_the_turns_agree_or_if_the_turn_of_the_answer_is_over() -> None:
    worker = Worker(HERE)
    first, second = worker.endpoints.next(THERE), worker.endpoints.next(THERE)
    assert worker.endpoints.follow(THERE, first, 0) is first
    assert worker.endpoints.follow(THERE, second, 0) is second
    assert worker.num_open == len(worker.made) == 2


def test_within_one_worker_hellos_have_even_turns_since_ucx_pairs_each_with_the_next() -> None:
    worker = Worker(HERE)
    asked = worker.endpoints.next(HERE)
    answer = worker.endpoints.answering(HERE, asked.turn)
    assert (asked.turn, answer.turn) == (0, 1)
    assert worker.endpoints.follow(HERE, asked, answer.turn) is asked
    assert worker.endpoints.next(HERE).turn == 2  # the hello of turn 2 gets no answer
    assert worker.endpoints.next(HERE).turn == 4


@pytest.mark.fault("F35")
def test_a_peer_that_claims_any_turn_costs_a_bounded_number_of_endpoints() -> None:
    worker = Worker(HERE)
    assert worker.endpoints.answering(THERE, 2**32 - 1).turn == MAX_SKIPPED
    assert len(worker.made) == MAX_SKIPPED + 1
    assert worker.num_open == 1


def test_spare_endpoints_are_bounded_and_closed_in_the_end() -> None:
    worker = Worker(HERE)
    for number in range(2 * MAX_SPARE):
        address = b"peer %d" % number
        worker.endpoints.follow(address, worker.endpoints.next(address), 1)
    assert worker.num_open == 2 * MAX_SPARE + MAX_SPARE
    worker.endpoints.close_spare()
    assert worker.num_open == 2 * MAX_SPARE
