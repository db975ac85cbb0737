"""The mesh's own certificate authority, whose certificates other programs must accept."""

from __future__ import annotations

import contextlib
import ssl
from pathlib import Path

import pytest
from cryptography import x509

from pdmesh.core.access.process_identity import ProcessIdentity
from pdmesh.errors import BadCertificates
from pdmesh.net.tls.authority import Authority
from tests.support.sites.certificates import TestAuthority


def test_the_authority_stays_the_same_and_its_keys_are_private(tmp_path: Path) -> None:
    first = Authority.opened(tmp_path / "tls").certificate
    assert Authority.opened(tmp_path / "tls").certificate == first
    folder = TestAuthority(tmp_path / "tls").issue("decode", "d-0")
    for path in (tmp_path / "tls/ca.key", folder / "tls.key"):
        assert path.stat().st_mode & 0o777 == 0o600


def test_a_certificate_has_the_process_its_names_and_its_addresses(tmp_path: Path) -> None:
    names = ["node-3.example.org", "10.0.0.5", "[::1]", "10.0.0.5"]
    folder = TestAuthority(tmp_path).issue("decode", "d-0", names=names)
    found = x509.load_pem_x509_certificate((folder / "tls.crt").read_bytes())
    san = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert san.get_values_for_type(x509.UniformResourceIdentifier) == ["spiffe://pdmesh/decode/d-0"]
    names = ["d-0.decode.pdmesh", "decode.pdmesh", "node-3.example.org"]
    assert san.get_values_for_type(x509.DNSName) == names
    addresses = san.get_values_for_type(x509.IPAddress)
    assert [str(address) for address in addresses] == ["10.0.0.5", "::1"]


def test_python_s_own_strict_tls_accepts_the_certificates(tmp_path: Path) -> None:
    """Python's strict check follows RFC 5280 exactly. NATS, Redis and Envoy are not stricter."""
    ours = TestAuthority(tmp_path)
    ends = []
    for side, role in ((ssl.PROTOCOL_TLS_SERVER, "nats"), (ssl.PROTOCOL_TLS_CLIENT, "gateway")):
        folder = ours.issue(role, "x-0", names=["127.0.0.1"])
        context = ssl.SSLContext(side)
        context.verify_mode = ssl.CERT_REQUIRED
        context.verify_flags |= ssl.VerifyFlags.VERIFY_X509_STRICT
        context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
        context.load_verify_locations(folder / "ca.crt")
        to_end, from_end = ssl.MemoryBIO(), ssl.MemoryBIO()
        is_server = side is ssl.PROTOCOL_TLS_SERVER
        host = None if is_server else "127.0.0.1"
        end = context.wrap_bio(to_end, from_end, server_side=is_server, server_hostname=host)
        ends.append((end, to_end, from_end))
    (server, to_server, from_server), (client, to_client, from_client) = ends
    for _ in range(4):
        for end in (client, server):
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
            to_server.write(from_client.read())
            to_client.write(from_server.read())
    peer = server.getpeercert()
    assert peer is not None
    assert ("URI", "spiffe://pdmesh/gateway/x-0") in peer["subjectAltName"]


@pytest.mark.parametrize("damaged", ["ca.key", "ca.crt"])
def test_an_authority_that_cannot_be_read_is_named(tmp_path: Path, damaged: str) -> None:
    Authority.opened(tmp_path)
    (tmp_path / damaged).write_text("rubbish")
    with pytest.raises(BadCertificates, match=str(tmp_path)):
        Authority.opened(tmp_path)


def test_a_key_of_another_authority_is_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        Authority.opened(tmp_path / name)
    (tmp_path / "b/ca.key").rename(tmp_path / "a/ca.key")
    with pytest.raises(BadCertificates, match="is not the key"):
        Authority.opened(tmp_path / "a")


def test_a_new_certificate_leaves_the_other_authorities_until_they_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While an authority is replaced, other processes still have certificates of the old one."""
    old, new = (TestAuthority(tmp_path / name).authority for name in ("old", "new"))
    monkeypatch.setattr("pdmesh.net.tls.authority._AUTHORITY_DAYS", -1)
    ended = TestAuthority(tmp_path / "ended").authority
    folder, identity = tmp_path / "p-0", ProcessIdentity("prefill", "p-0")
    for each in (ended, old, new, new):
        each.issue(identity, folder, days=1)
    trusted = x509.load_pem_x509_certificates((folder / "ca.crt").read_bytes())
    assert trusted == [new.certificate, old.certificate]
