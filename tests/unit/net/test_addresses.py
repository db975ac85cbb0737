"""Tests which addresses a proxy can use without a DNS resolver."""

from __future__ import annotations

import pytest

from pdmesh.net.addresses import is_numeric


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("10.0.0.1:8000", True),
        ("[fd00::1]:8000", True),
        ("gateway-0:8000", False),
        ("localhost:8000", False),
        ("10.0.0.1", False),
        ("fd00::1:8000", False),
        ("[10.0.0.1]:8000", False),
        ("10.0.0.1:http", False),
        ("", False),
    ],
)
def test_an_address_is_numeric_with_a_number_for_host_and_port(
    address: str, expected: bool
) -> None:
    assert is_numeric(address) is expected
