"""Who may call the admin API."""

from __future__ import annotations

import pytest

from pdmesh.errors import NotAllowed
from pdmesh.services.master_scheduler.admin.access import AdminAccess, is_local

TOKEN = "0123456789abcdef0123"
HERE, ELSEWHERE = "ipv4:127.0.0.1:4711", "ipv4:10.0.0.7:4711"


def test_without_a_token_only_this_machine_is_served() -> None:
    access = AdminAccess("")
    access.check((), HERE)
    with pytest.raises(NotAllowed):
        access.check((), ELSEWHERE)
    with pytest.raises(NotAllowed):
        access.check((("authorization", f"Bearer {TOKEN}"),), ELSEWHERE)


def test_with_a_token_every_caller_must_know_it() -> None:
    access = AdminAccess(TOKEN)
    access.check((("authorization", f"Bearer {TOKEN}"),), ELSEWHERE)
    for value in (f"Bearer {TOKEN}x", TOKEN, "Bearer ", ""):
        with pytest.raises(NotAllowed):
            access.check((("authorization", value),), HERE)
    with pytest.raises(NotAllowed):
        access.check((), HERE)


@pytest.mark.parametrize(
    ("peer", "expected"),
    [
        ("ipv4:127.0.0.1:1", True), ("ipv4:127.8.0.9:1", True), ("ipv6:[::1]:1", True),
        ("ipv6:%5B::1%5D:1", True),
        ("unix:/run/x", True), ("unix:", True), ("ipv4:192.168.0.1:1", False),
        ("ipv6:[fe80::1]:1", False),
        ("ipv4:1270.0.1:1", False), ("dns:localhost:1", False), ("", False),
    ],
)  # fmt: skip
def test_addresses_of_this_machine_are_recognized(peer: str, expected: bool) -> None:
    assert is_local(peer) is expected
