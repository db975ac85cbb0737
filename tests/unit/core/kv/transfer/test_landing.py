"""Tests when the landing range that a pull writes to may be reused."""

from __future__ import annotations

import pytest

from pdmesh.core.kv.transfer.landing import Landing
from pdmesh.core.kv.transfer.receiver_events import MetaArrived


def part(offset: int, length: int, *, is_inline: bool = False, of: int = 100) -> MetaArrived:
    return MetaArrived(5, 1, of, offset, length, is_inline)


def announced(*parts: MetaArrived) -> Landing:
    landing = Landing(100, 100)
    assert [landing.announce(p) for p in parts] == list(range(len(parts)))
    return landing


def test_a_landing_is_free_when_all_bytes_have_come_and_were_checked() -> None:
    landing = announced(part(0, 60), part(60, 40))
    assert landing.is_announced
    assert landing.is_owed
    for index in (1, 0):
        landing.posted.remove(index)
        landing.checking.add(index)
    assert not landing.is_owed
    assert not landing.is_free, "the bytes are still being checked"
    landing.checking.clear()
    assert landing.is_free


@pytest.mark.fault("F27")
def test_a_refusal_frees_the_landing_only_after_all_announced_parts_arrived() -> None:
    landing = announced(part(0, 60))
    landing.is_refused = True
    assert not landing.is_free, "a posted receive may still be written"
    landing.posted.clear()
    assert landing.is_free


@pytest.mark.fault("F2", "F3")
def test_the_end_of_the_connection_frees_a_landing_at_once() -> None:
    landing = announced(part(0, 60))
    assert landing.lose_peer(), "bytes are missing"
    assert landing.is_free
    whole = announced(part(0, 100, is_inline=True))
    assert not whole.lose_peer(), "all of them came with the announcement"


@pytest.mark.fault("F25", "F34")
@pytest.mark.parametrize(
    "second",
    [part(40, 50), part(20, 50), part(30, 80), part(30, 0), part(30, 50, of=90)],
    ids=["a gap", "an overlap", "past the end", "nothing", "another size"],
)
def test_no_byte_lands_twice_or_outside(second: MetaArrived) -> None:
    landing = announced(part(0, 30))
    assert landing.announce(second) is None
    assert (landing.num_parts, landing.posted) == (1, {0})


@pytest.mark.parametrize("size", [99, 101])
def test_a_pull_whose_size_differs_from_the_request_lands_nowhere(size: int) -> None:
    assert Landing(100, 100).announce(part(0, size, of=size)) is None


def test_nothing_is_announced_after_the_last_byte_or_a_refusal() -> None:
    assert announced(part(0, 100)).announce(part(100, 1)) is None
    refused = announced(part(0, 60))
    refused.is_refused = True
    assert refused.announce(part(60, 40)) is None
