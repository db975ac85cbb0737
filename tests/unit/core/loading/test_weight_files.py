"""Weight files are read in the order of their names. The index says which files to read."""

from __future__ import annotations

import pytest

from pdmesh.core.loading.weight_files import check_complete, files_to_read, in_order, parse_index
from pdmesh.core.loading.weight_header import StoredTensor, WeightHeader, WeightsUnreadable


def header(file: str, *names: str) -> WeightHeader:
    tensors = tuple(StoredTensor(name, "U8", (0,), 8, 8) for name in names)
    return WeightHeader(file, 8, 8, tensors)


@pytest.mark.req("S84")
def test_numbers_in_names_count_by_value() -> None:
    names = ["model-10.safetensors", "model-2.safetensors", "model-1-of-3.safetensors", "a"]
    assert in_order(names) == [
        "a",
        "model-1-of-3.safetensors",
        "model-2.safetensors",
        "model-10.safetensors",
    ]


def test_names_that_begin_with_digits_or_hold_none_have_an_order() -> None:
    assert in_order(["b", "10", "9", "", "1a"]) == ["", "1a", "9", "10", "b"]


@pytest.mark.req("S84", "S88")
def test_only_the_files_of_the_index_are_read_each_once() -> None:
    index = {"a": "model-2", "b": "model-1", "c": "model-2"}
    found = ["consolidated", "model-2", "model-1"]
    assert files_to_read(found, index) == ["model-1", "model-2"]
    assert files_to_read(found, None) == ["consolidated", "model-1", "model-2"]


def test_a_file_of_the_index_that_is_missing_is_named() -> None:
    with pytest.raises(WeightsUnreadable, match="model-2: is missing"):
        files_to_read(["model-1"], {"a": "model-1", "b": "model-2"})


def test_a_tensor_that_its_file_lacks_is_named_with_the_file() -> None:
    headers = [header("f1", "a"), header("f2", "b")]
    check_complete(headers, {"a": "f1", "b": "f2"})
    check_complete(headers, {"a": "f1", "z": "a file of another part of the model"})
    check_complete(headers, None)
    with pytest.raises(WeightsUnreadable, match="f2: the tensor a is missing"):
        check_complete(headers, {"a": "f2"})


@pytest.mark.parametrize("text", [b"[", b"[]", b"{}", b'{"weight_map": {"a": 1}}', b"\xff"])
def test_an_index_that_is_none_is_refused(text: bytes) -> None:
    with pytest.raises(WeightsUnreadable, match=r"model\.safetensors\.index\.json"):
        parse_index(text)


def test_an_index_maps_tensors_to_files() -> None:
    assert parse_index(b'{"metadata": {}, "weight_map": {"a": "f1"}}') == {"a": "f1"}
