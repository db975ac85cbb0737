"""Tests which ports, servers and pages need keys, tokens, HTTPS or TLS."""

from __future__ import annotations

import pytest

from pdmesh.core.access.exposure import (
    is_exposed,
    is_loopback,
    is_loopback_number,
    is_page_local,
    lacks_https,
    lacks_keys,
    lacks_mesh_token,
    lacks_secret,
    lacks_tls,
)

HERE, OPEN = "127.0.0.1", "10.0.0.1"
SENTINELS = "rediss-sentinel://gateway:s3cret@10.0.0.1:26379,10.0.0.2/2?primary=mesh"


@pytest.mark.parametrize(
    ("host", "is_here"),
    [
        ("localhost", True),
        ("127.0.0.9", True),
        ("::1", True),
        ("[::1]", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("localhost.example", False),
        ("", False),
    ],
)
def test_only_numeric_loopback_addresses_and_localhost_stay_on_this_machine(
    host: str, is_here: bool
) -> None:
    assert is_loopback(host) is is_here
    assert is_loopback_number(host) is (is_here and host != "localhost")


def test_a_port_that_only_this_machine_reaches_lacks_nothing() -> None:
    assert not lacks_keys(HERE, has_keys=False, is_anonymous_allowed=False)
    assert not lacks_tls(HERE, has_tls=False, is_trusted=False)
    assert not lacks_mesh_token(HERE, has_token=False, has_tls=False)
    assert not lacks_secret(HERE, has_own_secret=False)
    assert not lacks_https("http", HERE, is_trusted=False)


def test_clients_on_a_network_need_keys_unless_an_operator_allows_anyone() -> None:
    assert lacks_keys(OPEN, has_keys=False, is_anonymous_allowed=False)
    assert not lacks_keys(OPEN, has_keys=True, is_anonymous_allowed=False)
    assert not lacks_keys(OPEN, has_keys=False, is_anonymous_allowed=True)


def test_processes_on_a_network_need_tls_or_its_trust_and_then_the_meshs_token() -> None:
    assert lacks_tls(OPEN, has_tls=False, is_trusted=False)
    assert not lacks_tls(OPEN, has_tls=True, is_trusted=False)
    assert not lacks_tls(OPEN, has_tls=False, is_trusted=True)
    assert lacks_mesh_token(OPEN, has_token=False, has_tls=False)
    assert not lacks_mesh_token(OPEN, has_token=True, has_tls=False)
    assert not lacks_mesh_token(OPEN, has_token=False, has_tls=True)


def test_plans_are_signed_with_a_secret_of_the_meshs_own() -> None:
    assert lacks_secret(OPEN, has_own_secret=False)
    assert not lacks_secret(OPEN, has_own_secret=True)


def test_the_page_is_local_where_the_rest_has_tls_on_an_untrusted_network() -> None:
    assert is_page_local(has_tls=True, is_trusted=False)
    assert not is_page_local(has_tls=True, is_trusted=True)
    assert not is_page_local(has_tls=False, is_trusted=False)


def test_keys_of_a_provider_come_by_https() -> None:
    assert lacks_https("http", OPEN, is_trusted=False)
    assert not lacks_https("http", OPEN, is_trusted=True)
    assert not lacks_https("https", OPEN, is_trusted=False)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("tls://10.0.0.1:1,10.0.0.2:2", False),
        ("nats://127.0.0.1:1,127.0.0.2:2", False),
        ("nats://127.0.0.1:1,10.0.0.2:2", True),
        ("10.0.0.1:4222", True),
        (SENTINELS, False),
        (SENTINELS.replace("rediss", "redis"), True),
    ],
)
def test_one_server_in_plain_text_on_a_network_is_enough_to_be_exposed(
    url: str, expected: bool
) -> None:
    assert is_exposed(url) is expected
