"""`pdmesh access` writes NATS and Redis permission files for servers that an operator runs.

An error names the wrong argument.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from pdmesh.cli import app
from pdmesh.server_permissions.nats_accounts import Holder, nats_accounts
from pdmesh.server_permissions.redis_acl import redis_acl
from pdmesh.server_permissions.role_permissions import NATS_ROLES


def access(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        app.main(["access", *arguments])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_accounts_are_for_all_roles_or_for_those_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert access("nats") == 0
    assert capsys.readouterr().out == nats_accounts([Holder(role) for role in NATS_ROLES])
    assert access("nats", "gateway/g-0", "operator", "--trust-domain", "example.org") == 0
    named = [Holder("gateway", "g-0", "example.org"), Holder("operator", "*", "example.org")]
    assert capsys.readouterr().out == nats_accounts(named)


def test_passwords_of_redis_come_from_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "password").write_text("s3cret\n")
    assert access("redis", f"gateway={tmp_path / 'password'}") == 0
    assert capsys.readouterr().out == redis_acl({"gateway": "s3cret"})


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("nats", "gateway/*"), "spiffe://pdmesh/gateway/*"),
        (("nats", "Gateway"), "is not spiffe://TRUST-DOMAIN/ROLE/ID"),
        (("nats", "intern"), "no role is called 'intern'"),
        (("redis", "prefill=/dev/null"), "prefill does not use Redis"),
        (("redis", "gateway=/dev/null"), "gateway: the password is empty"),
        (("redis", "gateway=/nowhere"), "/nowhere: No such file"),
    ],
)
def test_a_wrong_argument_is_named(
    arguments: tuple[str, ...], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert access(*arguments) == 2
    assert problem in capsys.readouterr().err
