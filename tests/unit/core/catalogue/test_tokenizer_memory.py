"""Tests which tokenizers stay in memory, and when a failed load is tried again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdmesh.core.catalogue.tokenizer_memory import Residency


def test_the_least_recently_used_tokenizer_leaves() -> None:
    residency = Residency(max_bytes=10)
    assert residency.loaded("a", 4) == residency.loaded("b", 4) == []
    residency.used("a")
    assert residency.loaded("c", 4) == ["b"]
    assert residency.loaded("d", 9) == ["a", "c"]
    assert (len(residency), residency.num_bytes, residency.num_evicted) == (1, 9, 3)
    residency.check_invariants()


def test_a_tokenizer_larger_than_the_bound_stays_alone() -> None:
    residency = Residency(max_bytes=10)
    residency.loaded("a", 4)
    assert residency.loaded("huge", 100) == ["a"]
    assert residency.loaded("b", 1) == ["huge"]
    residency.check_invariants()


def test_each_retry_of_a_failed_load_waits_longer_until_one_succeeds() -> None:
    residency, now, waits = Residency(max_bytes=10), 0.0, []
    for _ in range(12):
        at = residency.failed("a", now)
        assert residency.retry_at("a", now) == at
        assert residency.retry_at("b", now) is None
        waits.append(at - now)
        now = at
        assert residency.retry_at("a", now) is None
    assert waits == sorted(waits)
    assert waits[0] < waits[-1] == waits[-2]
    residency.loaded("a", 1)
    assert residency.failed("b", 0.0) == waits[0]
    residency.check_invariants()


def test_failures_take_no_memory() -> None:
    residency = Residency(max_bytes=10)
    for number in range(5000):
        residency.failed(f"m{number}", 0.0)
    assert len(residency._failures) <= 1024


@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(1, 12)), max_size=60))
def test_the_bound_holds_whatever_is_used(uses: list[tuple[str, int]]) -> None:
    residency, resident = Residency(max_bytes=20), set[str]()
    for key, size in uses:
        if key in resident:
            residency.used(key)
        else:
            resident -= set(residency.loaded(key, size))
            resident.add(key)
        assert key in resident
        assert len(residency) == len(resident)
        residency.check_invariants()
