"""The fuzz targets in `tests/fuzz` for the KV wire, with random and with nearly valid input.

`make fuzz` runs the targets for longer.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.kv_wire import CORPUS, examples, feed_agent, feed_parser, seeds, sequence

known = st.sampled_from(examples())


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A message with some changed bytes. It may also be truncated."""
    raw = bytearray(draw(known))
    for _ in range(draw(st.integers(0, 3))):
        raw[draw(st.integers(0, len(raw) - 1))] = draw(st.integers(0, 255))
    return bytes(raw[: draw(st.sampled_from([len(raw), len(raw) - 1, len(raw) // 2]))])


@pytest.mark.fault("F25", "F34")
@given(st.one_of(damaged(), st.binary(max_size=200)))
def test_a_message_survives_encoding_and_parsing(data: bytes) -> None:
    feed_parser(data)


@pytest.mark.fault("F25", "F34")
@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(known, damaged()), max_size=8))
def test_no_sequence_of_messages_breaks_an_agent_or_leaks(
    messages: list[bytes],
) -> None:
    feed_agent(sequence(messages))


def test_the_corpus_is_of_this_wire_version_and_has_no_findings() -> None:
    found = {path.name: path.read_bytes() for path in CORPUS.iterdir()}
    assert found == seeds(), "write it again: python -m tests.fuzz.kv_wire"
    for data in found.values():
        feed_parser(data)
        feed_agent(data)
