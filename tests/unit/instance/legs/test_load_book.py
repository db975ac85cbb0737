"""What load reports name: admissions and timed prompts, each once, bounded."""

from __future__ import annotations

import pytest

from pdmesh.instance.legs.load_book import MAX_NAMED, Computed, LoadBook


@pytest.mark.req("S93", "S107")
def test_a_prompt_is_timed_from_the_moment_at_which_it_could_begin() -> None:
    """Two prompts are in the lane: the second one's time begins when the first one's ends."""
    book = LoadBook()
    book.admitted(1, "a", 100, now=1.0)
    book.admitted(2, "b", 200, now=1.1)
    book.computed(1, 0, now=2.0)
    book.computed(2, 64, now=3.5)
    admitted, computed = book.take()
    assert admitted == ["a", "b"]
    assert computed == [Computed("a", 100, 0, 1.0), Computed("b", 200, 64, 1.5)]
    assert book.take() == ([], [])


def test_prompts_that_share_a_step_or_were_given_up_are_reported_without_a_time() -> None:
    book = LoadBook()
    for leg, name in ((1, "a"), (2, "b"), (3, "c")):
        book.admitted(leg, name, 100, now=0.0)
    book.computed(1, 0, now=1.0)
    book.computed(2, 0, now=1.0)
    book.ended(3)
    book.ended(1)  # this adds nothing, since leg 1 was reported already
    assert [(c.request_id, c.seconds) for c in book.take()[1]] == [
        ("a", 1.0),
        ("b", 0.0),
        ("c", 0.0),
    ]


def test_a_decode_is_admitted_and_computes_nothing() -> None:
    book = LoadBook()
    book.admitted(1, "a", 0, now=0.0)
    book.ended(1)
    assert book.take() == (["a"], [])


def test_reports_are_bounded() -> None:
    book = LoadBook()
    for leg in range(MAX_NAMED + 100):
        book.admitted(leg, "r", 1, now=0.0)
        book.ended(leg)
    admitted, computed = book.take()
    assert (len(admitted), len(computed)) == (MAX_NAMED, MAX_NAMED)
