"""A block's owner is derived from its salt without revealing the salt."""

from __future__ import annotations

from pdmesh.core.kv.tiers.owner import OWNER_BYTES, owner_of


def test_blocks_have_one_owner_if_their_salts_are_equal() -> None:
    assert owner_of("salt-a") == owner_of("salt-a")
    assert owner_of("salt-a") != owner_of("salt-b")


def test_an_owner_is_short_and_not_the_salt() -> None:
    salt = bytes(range(16)).hex()
    owner = owner_of(salt)
    assert len(owner) == OWNER_BYTES
    assert owner not in (salt.encode()[:OWNER_BYTES], bytes.fromhex(salt)[:OWNER_BYTES])
