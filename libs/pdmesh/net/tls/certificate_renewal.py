"""Reads a process's certificate from a folder, and reads it again when the files are renewed.

The folder has three files, with the names that cert-manager uses: a certificate, its key, and the
authorities that the process trusts. A new certificate needs no restart, because every handshake
uses the latest files. If the new files cannot be used, for example because only one of them has
been replaced yet, the process keeps its earlier certificate and logs the reason once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

import structlog
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID

from pdmesh.core.access.process_identity import ProcessIdentity
from pdmesh.errors import BadCertificates

log = structlog.get_logger(__name__)

CERTIFICATE: Final = "tls.crt"  # the certificate and any intermediate certificates
KEY: Final = "tls.key"
AUTHORITIES: Final = "ca.crt"
_FILES: Final = (CERTIFICATE, KEY, AUTHORITIES)

_USAGES: Final = {
    ExtendedKeyUsageOID.SERVER_AUTH: "server auth",
    ExtendedKeyUsageOID.CLIENT_AUTH: "client auth",
}
_RETRY: Final = timedelta(seconds=10)

_Stamp = tuple[tuple[int, int, int] | None, ...]


@dataclass(frozen=True, slots=True)
class Certificates:
    """The contents of the three files, in PEM, and the facts about the certificate."""

    chain: bytes
    key: bytes = field(repr=False)
    authorities: bytes
    identity: ProcessIdentity
    expires_at: datetime  # the earliest expiry of the chain and its authority


class CertificateFolder:
    """The latest usable certificates of a folder.

    The constructor raises BadCertificates if the folder's files cannot be used.
    """

    def __init__(self, path: Path, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self.path = path
        self._clock = now
        self._lock = threading.Lock()
        self._stamp = _stamp(path)
        self._latest = read(path, now())
        self._problem = ""  # what is wrong with the present files
        self._retry_at: datetime | None = None

    @property
    def identity(self) -> ProcessIdentity:
        """The process that the certificate names. New files for another process are not used."""
        return self._latest.identity

    def latest(self) -> Certificates:
        """The latest usable certificates. The same object until the files change. Thread-safe."""
        with self._lock:
            stamp = _stamp(self.path)
            if stamp != self._stamp or self._is_retry_due():
                self._stamp = stamp
                self._reload()
        return self._latest

    def seconds_left(self) -> float:
        """The time until the certificate expires. Negative after that."""
        return (self.latest().expires_at - self._clock()).total_seconds()

    def _is_retry_due(self) -> bool:
        # A certificate that is not valid yet becomes valid without a change of the files.
        return self._retry_at is not None and self._clock() >= self._retry_at

    def _reload(self) -> None:
        try:
            found = read(self.path, self._clock())
            self._check_same(found.identity)
        except BadCertificates as exc:
            if exc.message != self._problem:
                log.warning("tls.not_reloaded", reason=exc.message)
            self._problem, self._retry_at = exc.message, self._clock() + _RETRY
            return
        self._latest, self._problem, self._retry_at = found, "", None
        log.info("tls.reloaded", expires_at=found.expires_at.isoformat())

    def _check_same(self, found: ProcessIdentity) -> None:
        own = self._latest.identity
        if found != own:
            raise BadCertificates(f"{self.path / CERTIFICATE} is for {found}, not {own}")


def _stamp(folder: Path) -> _Stamp:
    """A value that changes whenever one of the files changes."""
    return tuple(_stamp_of(folder / name) for name in _FILES)


def _stamp_of(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def read(folder: Path, now: datetime) -> Certificates:
    """Read and check the files. Raises BadCertificates, whose message names the bad file."""
    chain, key, authorities = (_bytes(folder / name) for name in _FILES)
    certificates = _parsed(folder / CERTIFICATE, chain)
    own = certificates[0]
    _check_time(folder / CERTIFICATE, own, now)
    _check_key(folder / KEY, key, own)
    root = _issuer(folder, certificates, _parsed(folder / AUTHORITIES, authorities))
    if now > root.not_valid_after_utc:
        raise BadCertificates(
            f"{folder / AUTHORITIES}: {root.subject.rfc4514_string()!r} expired at "
            f"{root.not_valid_after_utc:%Y-%m-%d %H:%M} UTC"
        )
    identity = _identity(folder / CERTIFICATE, own)
    _check_usage(folder / CERTIFICATE, own)
    expires_at = min(each.not_valid_after_utc for each in (*certificates, root))
    return Certificates(chain, key, authorities, identity, expires_at)


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as exc:
        raise BadCertificates(f"{path}: {exc.strerror}") from exc


def _parsed(path: Path, pem: bytes) -> Sequence[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError as exc:
        raise BadCertificates(f"{path} holds no certificate in PEM") from exc


def _check_time(path: Path, own: x509.Certificate, now: datetime) -> None:
    if now > own.not_valid_after_utc:
        raise BadCertificates(f"{path} expired at {own.not_valid_after_utc:%Y-%m-%d %H:%M} UTC")
    if now < own.not_valid_before_utc:
        raise BadCertificates(f"{path} is valid from {own.not_valid_before_utc:%Y-%m-%d %H:%M} UTC")


def _check_usage(path: Path, own: x509.Certificate) -> None:
    """Check that the certificate may be used both by servers and by clients.

    Without this check, only the other side of a later handshake would notice a missing usage.
    """
    try:
        usages = own.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except x509.ExtensionNotFound:
        return  # every usage is allowed
    if ExtendedKeyUsageOID.ANY_EXTENDED_KEY_USAGE in usages:
        return
    for usage, name in _USAGES.items():
        if usage not in usages:
            raise BadCertificates(f"{path} lacks the extended key usage {name!r}")


def _check_key(path: Path, pem: bytes, own: x509.Certificate) -> None:
    try:
        key = load_pem_private_key(pem, password=None)
    except (ValueError, TypeError) as exc:
        raise BadCertificates(f"{path} holds no private key in PEM without a password") from exc
    shape = (Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    if key.public_key().public_bytes(*shape) != own.public_key().public_bytes(*shape):
        raise BadCertificates(f"{path} is not the key of {CERTIFICATE}")


def _issuer(
    folder: Path, chain: Sequence[x509.Certificate], authorities: Sequence[x509.Certificate]
) -> x509.Certificate:
    """The authority that issued the chain. If several match, the one that expires last.

    TLS checks the chain again, and more strictly, but the errors raised here name the file.
    """
    current = chain[0]
    for issuer in (*chain[1:], None):
        if found := [each for each in authorities if _has_issued(each, current)]:
            return max(found, key=lambda each: each.not_valid_after_utc)
        if issuer is None or not _has_issued(issuer, current):
            break
        current = issuer
    raise BadCertificates(
        f"{folder / CERTIFICATE} was issued by {current.issuer.rfc4514_string()!r}, which is "
        f"not in {AUTHORITIES}"
    )


def _has_issued(issuer: x509.Certificate, certificate: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _identity(path: Path, own: x509.Certificate) -> ProcessIdentity:
    try:
        names = own.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, ValueError) as exc:
        raise BadCertificates(f"{path} names no process") from exc
    uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    if len(uris) != 1:
        raise BadCertificates(f"{path} must have one URI, spiffe://TRUST-DOMAIN/ROLE/ID")
    try:
        identity = ProcessIdentity.from_uri(uris[0])
    except ValueError as exc:
        raise BadCertificates(f"{path}: {exc}") from exc
    if identity.dns_name not in names.get_values_for_type(x509.DNSName):
        raise BadCertificates(f"{path} lacks the DNS name {identity.dns_name}")
    return identity
