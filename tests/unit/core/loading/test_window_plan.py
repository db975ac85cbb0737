"""Weights are read in windows that cover every byte once.

In the buffer, a window never overlaps the one before.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh.core.loading.weight_header import StoredTensor, WeightHeader
from pdmesh.core.loading.window_plan import ALIGNMENT, WeightWindow, handing_order, plan_windows


def header(file: str, sizes: list[int], data_begin: int = 100) -> WeightHeader:
    tensors, at = list[StoredTensor](), data_begin
    for number, size in enumerate(sizes):
        tensors.append(StoredTensor(f"{file}.{number}", "U8", (size,), at, at + size))
        at += size
    return WeightHeader(file, data_begin, at, tuple(tensors))


def ends_in_buffer(window: WeightWindow) -> int:
    return window.place + window.num_bytes


MODELS = st.lists(st.lists(st.integers(0, 500), max_size=12), max_size=6)


@pytest.mark.req("S84", "S86", "S87")
@given(MODELS, st.integers(1, 1000))
def test_each_byte_is_read_once_in_order_and_neighbours_do_not_overlap(
    model: list[list[int]], window_bytes: int
) -> None:
    headers = [header(f"f{n}", sizes) for n, sizes in enumerate(model)]
    plan = plan_windows(headers, window_bytes)
    by_file = {each.file: [w for w in plan.windows if w.file == each.file] for each in headers}
    assert [w for windows in by_file.values() for w in windows] == list(plan.windows)
    for each in headers:
        at = each.data_begin
        for window in by_file[each.file]:
            assert window.begin == at
            at = window.end
        assert at == each.file_bytes or not each.tensors
        handed = [t for window in by_file[each.file] for t in window.tensors]
        assert sorted(handed, key=str) == sorted(each.tensors, key=str)
    for window in plan.windows:
        assert window.num_bytes <= max(window_bytes, *(t.num_bytes for t in window.tensors))
        assert all(window.begin <= t.begin <= t.end <= window.end for t in window.tensors)
        assert window.place % ALIGNMENT == 0
        assert window.place >= 0
        assert ends_in_buffer(window) <= plan.buffer_bytes
    for one, two in pairwise(plan.windows):
        assert ends_in_buffer(one) <= two.place or ends_in_buffer(two) <= one.place


@pytest.mark.req("S86")
@given(MODELS, st.integers(1, 1000))
def test_the_buffer_is_bounded_by_two_windows_or_the_largest_tensors(
    model: list[list[int]], window_bytes: int
) -> None:
    plan = plan_windows([header(f"f{n}", sizes) for n, sizes in enumerate(model)], window_bytes)
    largest = max([window_bytes, *(size for sizes in model for size in sizes)])
    assert plan.buffer_bytes <= 2 * (largest + ALIGNMENT)


def test_one_long_tensor_needs_no_second_place_of_its_length() -> None:
    plan = plan_windows([header("f", [10, 6400, 10, 10])], window_bytes=64)
    assert plan.buffer_bytes == 6400 + 64
    assert [w.num_bytes for w in plan.windows] == [10, 6400, 20]


def test_the_smallest_tensor_of_a_window_is_handed_out_last() -> None:
    tensors = header("f", [5, 2, 9, 2]).tensors
    assert [t.name for t in handing_order(tensors)] == ["f.0", "f.2", "f.3", "f.1"]


def test_a_model_without_weights_has_no_windows() -> None:
    plan = plan_windows([header("f", [])])
    assert (plan.windows, plan.buffer_bytes) == ((), 0)
