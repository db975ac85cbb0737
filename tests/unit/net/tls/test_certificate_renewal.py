"""The certificate files of a process: which are refused, and when new files take effect."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import structlog
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID

from pdmesh.errors import BadCertificates
from pdmesh.net.tls.certificate_renewal import CertificateFolder
from tests.support.sites.certificates import TestAuthority


@pytest.fixture
def authority(tmp_path: Path) -> TestAuthority:
    return TestAuthority(tmp_path / "ours")


@pytest.fixture
def folder(authority: TestAuthority) -> Path:
    return authority.issue("prefill", "p-0")


def test_a_certificate_says_who_the_process_is_and_until_when(folder: Path) -> None:
    found = CertificateFolder(folder)
    assert str(found.identity) == "prefill/p-0"
    assert found.identity.trust_domain == "pdmesh"
    assert 0 < found.seconds_left() <= 86_400
    assert found.latest() is found.latest()


def _expired(authority: TestAuthority, folder: Path) -> None:
    authority.issue("prefill", "p-0", days=-1)


def _strange(authority: TestAuthority, folder: Path) -> None:
    """Replace the certificate by one of another authority. The trusted authorities stay."""
    other = TestAuthority(authority.root.parent / "theirs").issue("prefill", "p-0")
    for name in ("tls.crt", "tls.key"):
        shutil.copy(other / name, folder / name)


def _other_key(authority: TestAuthority, folder: Path) -> None:
    shutil.copy(authority.issue("decode", "d-0") / "tls.key", folder / "tls.key")


def _nameless(authority: TestAuthority, folder: Path) -> None:
    """Replace the certificate by the authority's own, which names no process."""
    shutil.copy(authority.root / "ca.crt", folder / "tls.crt")
    shutil.copy(authority.root / "ca.key", folder / "tls.key")


def _client_only(authority: TestAuthority, folder: Path) -> None:
    """Replace the certificate by one that is only for clients."""
    issued = x509.load_pem_x509_certificate((folder / "tls.crt").read_bytes())
    builder = (
        x509.CertificateBuilder()
        .subject_name(issued.subject)
        .issuer_name(issued.issuer)
        .public_key(issued.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(issued.not_valid_before_utc)
        .not_valid_after(issued.not_valid_after_utc)
    )
    for each in issued.extensions:
        is_usage = isinstance(each.value, x509.ExtendedKeyUsage)
        value = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH]) if is_usage else each.value
        builder = builder.add_extension(value, each.critical)
    made = builder.sign(authority.authority.key, hashes.SHA256())
    (folder / "tls.crt").write_bytes(made.public_bytes(Encoding.PEM))


BAD: dict[str, tuple[Callable[[TestAuthority, Path], None], str]] = {
    "no certificate": (lambda _, f: (f / "tls.crt").unlink(), r"tls\.crt: No such file"),
    "no key": (lambda _, f: (f / "tls.key").unlink(), r"tls\.key: No such file"),
    "no authorities": (lambda _, f: (f / "ca.crt").unlink(), r"ca\.crt: No such file"),
    "rubbish": (lambda _, f: _wrote(f / "tls.crt"), r"tls\.crt holds no certificate"),
    "no authority": (lambda _, f: _wrote(f / "ca.crt"), r"ca\.crt holds no certificate"),
    "rubbish as key": (lambda _, f: _wrote(f / "tls.key"), r"tls\.key holds no private key"),
    "expired": (_expired, r"tls\.crt expired at 20\d\d-"),
    "a stranger's": (_strange, r"tls\.crt was issued by .*theirs.*not in ca\.crt"),
    "another's key": (_other_key, r"tls\.key is not the key of tls\.crt"),
    "no server's": (_client_only, r"tls\.crt lacks the extended key usage 'server auth'"),
    "no name": (_nameless, r"tls\.crt names no process"),
}  # fmt: skip


def _wrote(path: Path) -> None:
    path.write_text("rubbish")


@pytest.mark.parametrize("case", BAD)
def test_files_that_cannot_be_used_are_refused_by_name(
    authority: TestAuthority, folder: Path, case: str
) -> None:
    damage, message = BAD[case]
    damage(authority, folder)
    with pytest.raises(BadCertificates, match=message):
        CertificateFolder(folder)


def test_a_certificate_that_is_not_valid_yet_is_refused(folder: Path) -> None:
    early = datetime.now(UTC) - timedelta(days=1)
    with pytest.raises(BadCertificates, match="is valid from"):
        CertificateFolder(folder, lambda: early)


def test_a_new_certificate_is_used_from_the_time_from_which_it_is_valid(
    authority: TestAuthority, folder: Path
) -> None:
    """The clock of the machine that issued the certificate may be ahead."""
    now = [datetime.now(UTC)]
    found = CertificateFolder(folder, lambda: now[0])
    first = found.latest()
    now[0] -= timedelta(minutes=10)
    authority.issue("prefill", "p-0")
    assert found.latest() is first
    now[0] += timedelta(minutes=10)
    assert found.latest().chain == (folder / "tls.crt").read_bytes() != first.chain


def test_a_new_certificate_takes_effect(authority: TestAuthority, folder: Path) -> None:
    found = CertificateFolder(folder)
    first = found.latest()
    authority.issue("prefill", "p-0", days=30)
    assert found.latest().chain == (folder / "tls.crt").read_bytes() != first.chain
    assert found.latest().key == (folder / "tls.key").read_bytes()
    assert found.seconds_left() > 86_400 * 29


@pytest.mark.parametrize("case", BAD)
def test_files_that_cannot_be_used_leave_the_earlier_ones_in_use_and_are_logged_once(
    authority: TestAuthority, folder: Path, case: str
) -> None:
    found = CertificateFolder(folder)
    first = found.latest()
    damage, _ = BAD[case]
    damage(authority, folder)
    with structlog.testing.capture_logs() as lines:
        assert [found.latest() for _ in range(3)] == [first] * 3
    assert [line["event"] for line in lines] == ["tls.not_reloaded"]
    authority.issue("prefill", "p-0")
    assert found.latest().chain != first.chain


def test_a_certificate_of_another_process_never_replaces_the_own_one(
    authority: TestAuthority, folder: Path
) -> None:
    found = CertificateFolder(folder)
    first = found.latest()
    shutil.copytree(authority.issue("master-scheduler", "m-0"), folder, dirs_exist_ok=True)
    with structlog.testing.capture_logs() as lines:
        assert found.latest() is first
    assert "is for master-scheduler/m-0, not prefill/p-0" in lines[0]["reason"]
    assert str(found.identity) == "prefill/p-0"


def test_a_chain_with_an_authority_in_between_is_accepted(
    authority: TestAuthority, folder: Path, tmp_path: Path
) -> None:
    """cert-manager writes the certificate and all certificates between it and the root into
    tls.crt.
    """
    root = TestAuthority(tmp_path / "root").root / "ca.crt"
    with (folder / "tls.crt").open("ab") as chain:
        chain.write((authority.root / "ca.crt").read_bytes())
    assert CertificateFolder(folder).latest()
    # two roots are trusted while one replaces the other
    with (folder / "ca.crt").open("ab") as authorities:
        authorities.write(root.read_bytes())
    assert CertificateFolder(folder).latest()


@pytest.mark.parametrize(("days", "is_usable"), [(0.5, True), (-1, False)])
def test_the_end_of_the_authority_counts_as_the_certificate_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, days: float, is_usable: bool
) -> None:
    """TLS accepts no certificate of an authority that has expired."""
    monkeypatch.setattr("pdmesh.net.tls.authority._AUTHORITY_DAYS", days)
    folder = TestAuthority(tmp_path / "short").issue("prefill", "p-0", days=1)
    if is_usable:
        assert 0 < CertificateFolder(folder).seconds_left() <= 43_200
        return
    with pytest.raises(BadCertificates, match=r"ca\.crt: .*short.* expired at 20"):
        CertificateFolder(folder)


def test_a_key_is_not_shown(folder: Path) -> None:
    assert "PRIVATE KEY" not in repr(CertificateFolder(folder).latest())
