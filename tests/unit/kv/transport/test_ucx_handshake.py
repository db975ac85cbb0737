"""The address of a KV agent, and the two messages that open a connection.

A message is ignored if a bit changed or if it was made with another key.
"""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh.kv.transport import ucx_handshake as handshake

KEY, OTHER = bytes(range(16)), bytes(16)
WORKER = bytes(range(52))
HELLO, WELCOME = handshake.Hello(7, 9, 3, WORKER), handshake.Welcome(11, 4)


def flips(data: bytes) -> list[bytes]:
    return [
        bytes(b ^ (1 << bit % 8) if n == bit // 8 else b for n, b in enumerate(data))
        for bit in range(8 * len(data))
    ]


def test_an_address_is_parsed_into_its_parts() -> None:
    address = handshake.Address(WORKER, KEY, 2**64 - 1)
    assert handshake.parse_address(str(address)) == address
    assert str(address).count("/") == 1


@pytest.mark.fault("F34")
def test_an_address_with_a_changed_character_never_reaches_ucx() -> None:
    address = handshake.Address(WORKER, KEY, 0xABC)
    text = str(address)
    end = text.index("/")  # the incarnation follows and is compared when the hello arrives
    for at in range(end):
        for other in "Aaf0-_.x":
            # changes of the unused bits after the last byte have no effect
            with contextlib.suppress(ValueError):
                changed = text[:at] + other + text[at + 1 :]
                assert handshake.parse_address(changed) == address


@given(st.text(max_size=200))
def test_an_invalid_address_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError):
        handshake.parse_address(text)


@pytest.mark.fault("F34", "F39")
def test_hello_and_welcome_are_accepted_only_with_the_key_and_unchanged() -> None:
    hello, welcome = handshake.pack_hello(HELLO, KEY), handshake.pack_welcome(9, WELCOME, KEY)
    assert handshake.read_hello(hello, KEY) == HELLO
    assert handshake.read_welcome(welcome, 9, KEY) == WELCOME
    assert handshake.read_hello(hello, OTHER) is None
    assert handshake.read_welcome(welcome, 9, OTHER) is None
    assert handshake.read_welcome(welcome, 8, KEY) is None, "it answers another hello"
    assert handshake.read_hello(welcome, KEY) is None
    assert handshake.read_welcome(hello, 9, KEY) is None
    assert not any(handshake.read_hello(changed, KEY) for changed in flips(hello))
    assert not any(handshake.read_welcome(changed, 9, KEY) for changed in flips(welcome))


@given(st.binary(max_size=200))
def test_any_bytes_before_the_handshake_are_ignored(data: bytes) -> None:
    assert handshake.read_hello(data, KEY) is None
    assert handshake.read_welcome(data, 9, KEY) is None
