"""`pdmesh certs` issues certificates that the mesh's processes can use, or says why it cannot."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdmesh.cli import app
from pdmesh.net.tls.certificate_renewal import CertificateFolder


def certs(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        app.main(["certs", *arguments])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_each_named_process_gets_a_folder_that_it_can_use(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--out", str(tmp_path), "--name", "10.0.0.5", "--name", "node-3"]
    assert certs("prefill/prefill-0", "operator/ann", *out) == 0
    folders = capsys.readouterr().out.splitlines()
    assert folders == [str(tmp_path / "prefill/prefill-0"), str(tmp_path / "operator/ann")]
    found = [CertificateFolder(Path(folder)) for folder in folders]
    assert [str(each.identity) for each in found] == ["prefill/prefill-0", "operator/ann"]
    assert found[0].latest().authorities == found[1].latest().authorities
    assert found[0].seconds_left() > 364 * 86_400


def test_by_default_the_authority_is_in_the_state_directory(tmp_path: Path) -> None:
    assert certs("decode/decode-0", "--days", "2", "--state-dir", str(tmp_path / "s")) == 0
    assert (tmp_path / "s").stat().st_mode & 0o777 == 0o700
    found = CertificateFolder(tmp_path / "s/tls/decode/decode-0")
    assert 86_400 < found.seconds_left() <= 2 * 86_400


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["prefill"], 2, "'prefill' is not ROLE/ID"),
        (["prefill/../x"], 2, "is not ROLE/ID"),
        (["Prefill/x"], 2, "is not ROLE/ID"),
        (["prefill/x", "--name", "köln"], 1, "--name: "),
        (["prefill/x", "--days", "1e9"], 1, "--days: "),
        (["prefill/x", "--days", "0"], 2, "must be a positive number"),
    ],
)
def test_what_cannot_be_certified_is_refused_in_one_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    message: str,
) -> None:
    assert certs(*arguments, "--out", str(tmp_path)) == code
    assert message in capsys.readouterr().err.splitlines()[-1]
    assert not list(tmp_path.rglob("tls.crt"))


def test_an_authority_that_cannot_be_read_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ca.key").write_text("rubbish")
    (tmp_path / "ca.crt").write_text("rubbish")
    assert certs("prefill/x", "--out", str(tmp_path)) == 1
    assert "holds no authority that can be read" in capsys.readouterr().err
