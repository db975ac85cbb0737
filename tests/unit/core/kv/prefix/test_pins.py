"""Pins are operators' orders to keep prefixes in pools and files. Their number is limited."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pdmesh.core.kv.prefix.block_hash import block_hashes, tenant_root
from pdmesh.core.kv.prefix.pins import (
    MAX_BLOCKS,
    MAX_PINS,
    Cut,
    PinnedPrefix,
    WantedPin,
    check_room,
    pinned_within,
)
from pdmesh.errors import InvalidRequest

PIN = WantedPin("system-prompt", "acme", "salt", tuple(range(10)), 60)
CUT = Cut("fp", 4)


@pytest.mark.req("S78")
def test_a_pin_gives_blocks_the_same_names_as_its_tenants_prompts_do() -> None:
    root = PIN.roots(b"secret", [CUT])[CUT]
    assert root == tenant_root(b"secret", "acme", "salt", "fp")
    assert PIN.names(root, CUT) == tuple(block_hashes(root, range(8), 4)), "two full blocks"


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("pin_id", {"pin_id": "Not An Id"}),
        ("tenant", {"tenant": ""}),
        ("prefix_token_ids", {"token_ids": ()}),
        ("ttl_s", {"ttl_s": 1}),
        ("ttl_s", {"ttl_s": 10**9}),
    ],
)
def test_the_refusal_of_a_bad_pin_names_its_field(field: str, change: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        replace(PIN, **change)
    assert caught.value.field == field


@pytest.mark.parametrize("num_tokens", [3, (MAX_BLOCKS + 1) * 4])
def test_a_pin_shorter_than_a_block_or_longer_than_the_bound_is_refused(num_tokens: int) -> None:
    pin = replace(PIN, token_ids=tuple(range(num_tokens)))
    with pytest.raises(InvalidRequest):
        pin.names(b"r" * 16, CUT)


@pytest.mark.req("S96")
def test_pins_are_bounded_in_number_and_in_blocks_of_each_fingerprint() -> None:
    full = {f"p{n}": {"fp": 1} for n in range(MAX_PINS)}
    with pytest.raises(InvalidRequest, match="remove one"):
        check_room("new", {"fp": 1}, full)
    check_room("p0", {"fp": 1}, full)  # this replaces the existing pin of that id
    half = {"a": {"fp": MAX_BLOCKS - 2}}
    check_room("b", {"fp": 2, "other": MAX_BLOCKS}, half)
    with pytest.raises(InvalidRequest, match="too many"):
        check_room("b", {"fp": 3}, half)


@pytest.mark.req("S78", "S96")
def test_pins_take_half_of_a_store_and_the_first_pins_come_first() -> None:
    first = PinnedPrefix((b"a", b"b"), b"owner", 1.0)
    second = PinnedPrefix((b"b", b"c", b"d"), b"owner", 2.0)
    assert pinned_within([first, second], 6) == {b"a": first, b"b": second, b"c": second}
    assert list(pinned_within([first, second], 3)) == [b"a"]
    assert list(pinned_within([first, second], 1000)) == [b"a", b"b", b"c", b"d"]
