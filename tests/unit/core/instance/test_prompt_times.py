"""Load reports name each admitted prompt once and each computed prompt once, with times.

The size of a report is bounded.
"""

from __future__ import annotations

import pytest

from pdmesh.core.instance.prompt_times import MAX_NAMED, Computed, LoadBook


@pytest.mark.req("S93", "S107")
def test_a_prompt_alone_is_timed_from_the_moment_at_which_it_could_begin() -> None:
    book = LoadBook()
    book.admitted(1, "a", 100, now=1.0)
    book.computed(1, 0, now=2.0)
    book.admitted(2, "b", 200, now=3.0)
    book.computed(2, 64, now=3.5)
    admitted, computed = book.take()
    assert admitted == ["a", "b"]
    assert computed == [Computed("a", 100, 0, 1.0), Computed("b", 200, 64, 0.5)]
    assert book.take() == ([], [])


@pytest.mark.req("S93", "S107")
def test_prompts_that_share_steps_are_timed_together_until_none_is_left() -> None:
    """The engine computed a part of b in the same steps as a. So the time between their ends
    belongs to neither prompt alone.
    """
    book = LoadBook()
    for leg, name in ((1, "a"), (2, "b"), (3, "c")):
        book.admitted(leg, name, 100, now=0.0)
    book.computed(1, 0, now=1.0)
    book.computed(2, 0, now=1.5)
    book.computed(3, 0, now=1.5)
    assert [(c.request_id, c.seconds) for c in book.take()[1]] == [
        ("a", 0.0),
        ("b", 0.0),
        ("c", 1.5),
    ]
    book.admitted(4, "d", 100, now=9.0)
    book.computed(4, 0, now=9.25)
    assert book.take()[1] == [Computed("d", 100, 0, 0.25, 1)], "the idle time is not counted"


@pytest.mark.req("S93")
def test_an_instance_that_is_never_idle_is_timed_at_the_ends_of_steps() -> None:
    """The engine computes four prompts a step. A time is reported when the first prompt of a later
    step ends.
    """
    book, now = LoadBook(), 0.0
    for leg in range(40):
        book.admitted(leg, f"r{leg}", 100, now)
    for leg in range(36):
        now += 0.5 * (leg % 4 == 0)
        book.computed(leg, 0, now)
    timed = [c for c in book.take()[1] if c.seconds]
    assert timed == [Computed("", 0, 0, 2.0, 4), Computed("", 0, 0, 2.0, 4)]


def test_a_prompt_that_was_given_up_has_no_tokens_and_no_time() -> None:
    book = LoadBook()
    book.admitted(1, "a", 100, now=0.0)
    book.admitted(2, "b", 100, now=0.0)
    book.computed(1, 0, now=1.0)
    book.ended(2, now=1.0)
    book.ended(1, now=1.0)  # leg 1 was reported before, so its end adds nothing
    assert book.take()[1] == [
        Computed("a", 100, 0, 0.0),
        Computed("b", 0, 0, 0.0),
        Computed("", 0, 0, 1.0, 1),
    ]


def test_a_decode_is_admitted_and_computes_nothing() -> None:
    book = LoadBook()
    book.admitted(1, "a", 0, now=0.0)
    book.ended(1, now=0.0)
    assert book.take() == (["a"], [])


def test_reports_are_bounded() -> None:
    book = LoadBook()
    for leg in range(MAX_NAMED + 100):
        book.admitted(leg, "r", 1, now=0.0)
        book.ended(leg, now=0.0)
    admitted, computed = book.take()
    assert (len(admitted), len(computed)) == (MAX_NAMED, MAX_NAMED)


@pytest.mark.req("S93", "S107")
def test_who_decodes_beside_a_prompt_is_counted_over_its_time_without_itself() -> None:
    """A count at the end of a prompt would miss requests that stopped decoding before. A later
    count would include the prompt's own request.
    """
    book = LoadBook()
    book.admitted(1, "a", 100, now=0.0)
    book.computed(1, 0, now=1.0)
    book.decodes(1, now=1.0)
    book.admitted(2, "b", 0, now=1.5)
    book.decodes(2, now=2.0)
    book.admitted(3, "c", 100, now=3.0)
    book.ended(2, now=4.0)
    book.computed(3, 0, now=5.0)
    book.decodes(3, now=5.0)
    book.ended(1, now=6.0)
    book.admitted(4, "d", 100, now=7.0)
    book.computed(4, 0, now=9.0)
    told = [(c.request_id, c.seconds, c.num_beside) for c in book.take()[1]]
    assert told == [("a", 1.0, 0.0), ("c", 2.0, 1.5), ("d", 2.0, 1.0)]


@pytest.mark.req("S93", "S107")
def test_a_span_that_ends_while_prompts_are_open_has_its_own_count() -> None:
    book = LoadBook()
    for leg in range(17):
        book.admitted(leg, f"r{leg}", 100, now=0.0)
    book.decodes(99, now=0.0)
    for leg in range(16):
        book.computed(leg, 0, now=2.0)
    book.decodes(98, now=2.0)
    book.computed(16, 0, now=3.0)
    assert [(c.seconds, c.num_steps, c.num_beside) for c in book.take()[1] if c.seconds] == [
        (2.0, 1, 1.0),
        (1.0, 1, 2.0),
    ]
