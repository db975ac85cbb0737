"""The header of a weight file says where the tensors are.

An error names the file whose header is wrong.
"""

from __future__ import annotations

import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh.core.loading.weight_header import (
    ELEMENT_BYTES,
    LENGTH_BYTES,
    MAX_HEADER_BYTES,
    WeightHeader,
    WeightsUnreadable,
    header_bytes,
    parse,
)
from tests.support.loading.weight_files import Shapes, header_of, num_data_bytes

SHAPES: Shapes = {"a": ("BF16", (2, 3)), "scale": ("F32", ()), "none": ("U8", (0, 4))}


def read(head: bytes, file_bytes: int) -> WeightHeader:
    """Parse a header in the two steps of a reader."""
    length = header_bytes("f", head[:LENGTH_BYTES], file_bytes)
    return parse("f", head[LENGTH_BYTES : LENGTH_BYTES + length], file_bytes)


def test_tensors_have_their_place_in_the_file() -> None:
    head = header_of(SHAPES)
    found = read(head, len(head) + num_data_bytes(SHAPES))
    by_name = {tensor.name: tensor for tensor in found.tensors}
    assert found.data_begin == len(head)
    assert (by_name["a"].begin, by_name["a"].end) == (len(head), len(head) + 12)
    assert (by_name["scale"].begin, by_name["scale"].num_bytes) == (len(head) + 12, 4)
    assert by_name["none"].num_bytes == 0
    assert by_name["a"].shape == (2, 3)


@pytest.mark.req("S88")
@given(
    st.dictionaries(
        st.text(min_size=1).filter(lambda name: name != "__metadata__"),
        st.tuples(
            st.sampled_from(sorted(ELEMENT_BYTES)),
            st.lists(st.integers(0, 9), max_size=3).map(tuple),
        ),
    ),
    st.integers(1, 10_000),
)
def test_every_valid_file_is_read_and_no_part_of_one_is(shapes: Shapes, missing: int) -> None:
    head = header_of(shapes)
    file_bytes = len(head) + num_data_bytes(shapes)
    found = read(head, file_bytes)
    assert {t.name: (t.dtype, t.shape) for t in found.tensors} == dict(shapes)
    at = found.data_begin
    for tensor in found.tensors:
        assert tensor.begin == at
        at = tensor.end
    assert at == file_bytes
    with pytest.raises(WeightsUnreadable) as raised:
        read(head, max(0, file_bytes - missing))
    assert raised.value.message.startswith("f: ")


def test_a_header_longer_than_its_file_or_than_any_is_refused() -> None:
    for length, file_bytes in ((93, 100), (MAX_HEADER_BYTES + 1, 1 << 40)):
        with pytest.raises(WeightsUnreadable, match=f"f: its header has {length} bytes"):
            header_bytes("f", length.to_bytes(8, "little"), file_bytes)
    assert header_bytes("f", (92).to_bytes(8, "little"), 100) == 92


TENSOR = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}


@pytest.mark.parametrize(
    ("told", "problem"),
    [
        ([], "not a JSON object"),
        ({"a": 3}, "does not describe a"),
        ({"a": TENSOR | {"dtype": "F3"}}, "unknown number format 'F3'"),
        ({"a": TENSOR | {"dtype": [1]}}, "unknown number format"),
        ({"a": TENSOR | {"shape": [-4]}}, "no valid shape"),
        ({"a": TENSOR | {"shape": [True, 4]}}, "no valid shape"),
        ({"a": TENSOR | {"data_offsets": [0]}}, "no valid shape"),
        ({"a": TENSOR | {"shape": [5]}}, "has 4 bytes"),
        ({"a": TENSOR | {"data_offsets": [1, 5]}}, "do not follow"),
        ({"a": TENSOR, "b": TENSOR}, "do not follow"),
    ],
)
def test_what_is_wrong_in_a_header_is_said(told: object, problem: str) -> None:
    with pytest.raises(WeightsUnreadable, match=problem):
        parse("f", json.dumps(told).encode(), 1000)


def test_a_header_that_is_no_json_is_refused() -> None:
    for text in (b"{", b"\xff", b"[" * 100_000):
        with pytest.raises(WeightsUnreadable, match="f: its header is not JSON"):
            parse("f", text, len(text) + 8)


def test_bytes_after_the_last_tensor_are_refused() -> None:
    text = json.dumps({"a": TENSOR}).encode()
    with pytest.raises(WeightsUnreadable, match="too long"):
        parse("f", text, 8 + len(text) + 5)


def test_a_fault_keeps_its_file_when_it_crosses_a_process() -> None:
    fault = pickle.loads(pickle.dumps(WeightsUnreadable("model.safetensors", "is cut off")))
    assert (fault.message, fault.field, fault.reason) == (
        "model.safetensors: is cut off",
        "model.safetensors",
        "WEIGHTS_UNREADABLE",
    )
