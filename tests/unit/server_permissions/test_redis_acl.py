"""The ACL file of Redis has no passwords and no users that the table of roles lacks."""

from __future__ import annotations

import hashlib

import pytest

from pdmesh.server_permissions.redis_acl import redis_acl


def test_a_file_holds_digests_and_lets_nobody_else_in() -> None:
    lines = redis_acl({"kv-cache-index": "s3cret", "gateway": "0ther"}).splitlines()
    assert [line.split()[:3] for line in lines] == [
        ["user", "default", "off"],
        ["user", "gateway", "on"],
        ["user", "kv-cache-index", "on"],
    ]
    assert f"#{hashlib.sha256(b's3cret').hexdigest()} " in lines[2]
    assert "s3cret" not in "".join(lines)
    assert not any("@all" in word and word != "-@all" for line in lines for word in line.split())


def test_tools_only_read() -> None:
    (_, line) = redis_acl({"operator": "x"}).splitlines()
    assert not [word for word in line.split() if word.startswith("~")]
    assert "%R~pdmesh:v1:instances" in line


@pytest.mark.parametrize(
    ("passwords", "problem"),
    [({"prefill": "x"}, "prefill does not use Redis"), ({"gateway": ""}, "gateway: the password")],
)
def test_what_makes_no_user_is_refused(passwords: dict[str, str], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        redis_acl(passwords)
