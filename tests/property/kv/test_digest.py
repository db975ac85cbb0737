"""The checksum of device memory detects every change of bytes, places or length."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh.kv.device.digest import digest


def by_definition(data: bytes) -> bytes:
    """The same sums by definition, word by word with Python's integers."""
    mask, plain, weighted = (1 << 64) - 1, 0, 0
    for place, at in enumerate(range(0, len(data), 8)):
        word = int.from_bytes(data[at : at + 8].ljust(8, b"\0"), "little")
        x = word ^ (place * 0x9E3779B97F4A7C15 + 0xD1B54A32D192ED03) & mask
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
        x ^= x >> 31
        plain, weighted = plain + x & mask, weighted + x * (2 * place + 1) & mask
    sums = (plain + len(data) & mask, weighted ^ len(data))
    return b"".join(value.to_bytes(8, "little") for value in sums)


def of(data: bytes) -> bytes:
    return digest(np.frombuffer(data, np.uint8))


@pytest.mark.req("S50")
@given(st.binary(max_size=300))
def test_it_is_what_its_definition_says(data: bytes) -> None:
    assert of(data) == by_definition(data)
    odd = np.frombuffer(b"x" + data, np.uint8)[1:]  # begins inside a word
    assert digest(odd) == of(data)


@pytest.mark.req("S50")
def test_many_words_are_added_as_few_are() -> None:
    data = np.random.default_rng(3).integers(0, 256, 200_003, np.uint8).tobytes()
    assert of(data) == by_definition(data)


@pytest.mark.req("S50")
@given(st.binary(min_size=1, max_size=300), st.data())
def test_a_change_a_swap_or_another_length_changes_it(data: bytes, draw: st.DataObject) -> None:
    bit = draw.draw(st.integers(0, 8 * len(data) - 1))
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    assert of(bytes(changed)) != of(data)
    assert of(data + b"\0") != of(data)
    words = [data[i : i + 8] for i in range(0, len(data) - 7, 8)]
    for i in range(len(words) - 1):
        if words[i] != words[i + 1]:
            swapped = [*words[:i], words[i + 1], words[i], *words[i + 2 :]]
            assert of(b"".join(swapped)) != of(b"".join(words))
