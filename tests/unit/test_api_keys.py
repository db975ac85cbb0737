"""API keys are shown once, stored as hashes, and end when they expire or are revoked.

The tests include the command that makes keys.
"""

from __future__ import annotations

import stat
import time
from pathlib import Path

import pytest

from pdmesh import api_keys
from pdmesh.api_keys import BadKeyFile, KeyFile, Keyring
from pdmesh.cli import app


def cli(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        app.main(["keys", *arguments])
    assert isinstance(caught.value.code, int)
    return caught.value.code


@pytest.mark.fault("F39")
def test_a_key_is_found_by_its_whole_text_and_by_nothing_else() -> None:
    file = KeyFile()
    token = api_keys.issue(file, "acme")
    other = api_keys.issue(file, "beta")
    keyring = Keyring(file)
    found = keyring.find(token, 0.0)
    assert found is not None
    assert found.name == "acme"
    _, key_id, secret = token.split("_", 2)
    _, other_id, _ = other.split("_", 2)
    wrong = (
        "", "pdm", token[:-1], token + "x", token.upper(), f"pdm_{other_id}_{secret}",
        f"xyz_{key_id}_{secret}", f"pdm_{key_id}_", "pdm__", "\ud800", "é" * 40, "x" * 10_000,
        f"pdm_{key_id}_{file.keys[0].sha256}",
    )  # fmt: skip
    assert [w for w in wrong if keyring.find(w, 0.0) is not None] == []


@pytest.mark.fault("F39")
def test_the_file_holds_no_key_and_is_the_owners_alone(tmp_path: Path) -> None:
    path, file = tmp_path / "keys.json", KeyFile()
    token = api_keys.issue(file, "acme")
    api_keys.save(path, file)
    assert token.split("_", 2)[2] not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert Keyring(api_keys.load(path)).find(token, 0.0) is not None


@pytest.mark.fault("F39")
def test_a_key_ends_when_it_expires_or_is_revoked() -> None:
    file = KeyFile()
    short = api_keys.issue(file, "acme", expires_at=100)
    revoked = api_keys.issue(file, "acme")
    assert Keyring(file).find(short, 99.9) is not None
    assert Keyring(file).find(short, 100.0) is None
    assert api_keys.revoke(file, revoked.split("_")[1])
    assert not api_keys.revoke(file, revoked.split("_")[1])
    assert Keyring(file).find(revoked, 0.0) is None


@pytest.mark.parametrize(
    "content",
    [
        "", "[]", '{"keys": 1}', '{"surprise": 1}', '{"tenants": {"A b": {}}}',
        '{"tenants": {"a": {"weight": 0}}}', '{"tenants": {"a": {"requests_per_s": -1}}}',
        '{"keys": [{"key_id": "1", "tenant": "a", "sha256": "00", "created_at": 1}]}',
        (
            '{"tenants": {"a": {}}, "keys": [{"key_id": "1", "tenant": "a", "sha256": "0", '
            '"created_at": 1}]}'
        ),
    ],
)  # fmt: skip
def test_a_file_that_is_wrong_is_refused_with_its_name(tmp_path: Path, content: str) -> None:
    path = tmp_path / "keys.json"
    path.write_text(content)
    with pytest.raises(BadKeyFile, match=r"keys\.json"):
        api_keys.load(path)


def test_the_command_adds_lists_and_revokes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "deep" / "keys.json"
    limits = ("--requests-per-s", "2.5", "--max-concurrent", "4", "--weight", "3", "--models", "m")
    assert cli("add", "acme", "--file", str(path), *limits) == 0
    token = capsys.readouterr().out.strip()
    assert cli("add", "acme", "--file", str(path), "--expires-days", "1") == 0
    second = capsys.readouterr().out.strip()
    tenant = Keyring(api_keys.load(path)).find(token, time.time())
    assert tenant is not None
    assert (tenant.limits.requests_per_s, tenant.weight) == (2.5, 3), "a second key changes nothing"
    assert tenant.models == {"m"}
    assert cli("list", "--file", str(path)) == 0
    shown = capsys.readouterr().out
    assert token.split("_")[1] in shown
    assert token.split("_", 2)[2] not in shown
    assert cli("revoke", "--file", str(path), second.split("_")[1]) == 0
    assert cli("revoke", "--file", str(path), "nope") == 1
    assert len(api_keys.load(path).keys) == 1


def test_the_command_refuses_names_and_limits_that_mean_nothing(tmp_path: Path) -> None:
    path = str(tmp_path / "keys.json")
    assert cli("add", "A b", "--file", path) == 2
    assert cli("add", "acme", "--file", path, "--requests-per-s", "-1") == 2
    assert cli("list", "--file", path) == 1
