"""Stop strings are found however the text is cut into pieces."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdmesh.core.sampling.stop_strings import StopText

texts = st.text(alphabet="ab", max_size=30)
stops_of = st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3)


def run(pieces: list[str], stops: list[str]) -> tuple[str, bool]:
    matcher = StopText(stops)
    shown = "".join(matcher.feed(piece) for piece in pieces)
    return shown + matcher.flush(), matcher.is_stopped


@given(pieces=st.lists(texts, max_size=8), stops=stops_of)
def test_the_result_does_not_depend_on_where_the_text_is_cut(
    pieces: list[str], stops: list[str]
) -> None:
    text = "".join(pieces)
    assert run(pieces, stops) == run([text], stops) == run(list(text), stops)


@given(pieces=st.lists(texts, max_size=8), stops=stops_of)
def test_no_part_of_a_stop_that_was_found_is_shown(pieces: list[str], stops: list[str]) -> None:
    text = "".join(pieces)
    shown, is_stopped = run(pieces, stops)
    assert text.startswith(shown)
    assert is_stopped == any(stop in text for stop in stops)
    assert not any(stop in shown for stop in stops)
    assert is_stopped or shown == text
    if is_stopped:
        assert any(text[len(shown) :].startswith(stop) for stop in stops)


@given(pieces=st.lists(texts, max_size=8), stops=stops_of)
def test_text_that_cannot_become_a_stop_is_not_held_back(
    pieces: list[str], stops: list[str]
) -> None:
    matcher = StopText(stops)
    shown, fed = "", ""
    for piece in pieces:
        shown, fed = shown + matcher.feed(piece), fed + piece
        held = fed[len(shown) :]
        assert matcher.is_stopped or not held or any(s.startswith(held) for s in stops)
