"""The mesh's own certificate authority, for a mesh without cert-manager or a similar tool.

The authority's key stays in a file that only this user can read. Whoever has the key can pose as
any process of the mesh.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final, Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from pdmesh.atomic_file import write_atomically
from pdmesh.core.access.process_identity import ProcessIdentity
from pdmesh.errors import BadCertificates
from pdmesh.net.tls.certificate_renewal import AUTHORITIES, CERTIFICATE, KEY

CERTIFICATE_DAYS: Final = 365.0
_AUTHORITY_KEY: Final = "ca.key"
_AUTHORITY_DAYS: Final = 3650.0
_CLOCK_SKEW: Final = timedelta(minutes=5)  # other machines' clocks may be behind


@dataclass(frozen=True)
class Authority:
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @classmethod
    def opened(cls, folder: Path) -> Self:
        """The authority in the folder. Made at the first call. Raises BadCertificates, OSError."""
        path = folder / _AUTHORITY_KEY
        if not path.exists():
            made = cls.new(f"pdmesh {folder.absolute()}")
            # The key is written last. If it is missing, the next call makes a new pair.
            write_atomically(folder / AUTHORITIES, made._pem().decode())
            write_atomically(path, _key_pem(made.key).decode())
            return made
        try:
            key = load_pem_private_key(path.read_bytes(), password=None)
            certificate = x509.load_pem_x509_certificate((folder / AUTHORITIES).read_bytes())
        except (ValueError, TypeError) as exc:
            raise BadCertificates(f"{folder} holds no authority that can be read") from exc
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise BadCertificates(f"{path} is not a key of an elliptic curve")
        if certificate.public_key() != key.public_key():
            raise BadCertificates(f"{path} is not the key of {AUTHORITIES}")
        return cls(certificate, key)

    @classmethod
    def new(cls, name: str) -> Self:
        key = ec.generate_private_key(ec.SECP256R1())
        # Authorities may have the same name. They differ in serial number and key.
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[-64:])])
        identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
        certificate = (
            _dated(subject, subject, key, _AUTHORITY_DAYS)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs_certificates=True), critical=True)
            .add_extension(identifier, critical=False)
            .sign(key, hashes.SHA256())
        )
        return cls(certificate, key)

    def issue(
        self,
        identity: ProcessIdentity,
        folder: Path,
        names: Sequence[str] = (),
        days: float = CERTIFICATE_DAYS,
    ) -> None:
        """Write a new certificate and key into the folder, and add this authority. Raises OSError.

        `names` are the DNS names and IP addresses by which others reach the process. A negative
        number of days makes a certificate that has expired.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        alternatives = [
            x509.UniformResourceIdentifier(identity.uri),
            x509.DNSName(identity.dns_name),
            x509.DNSName(identity.role_dns_name),
            *map(_general_name, dict.fromkeys(names)),
        ]
        usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key())
        certificate = (
            _dated(_subject(identity), self.certificate.subject, key, days)
            .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(issuer, critical=False)
            .sign(self.key, hashes.SHA256())
        )
        write_atomically(folder / KEY, _key_pem(key).decode())
        write_atomically(folder / CERTIFICATE, certificate.public_bytes(Encoding.PEM).decode())
        write_atomically(folder / AUTHORITIES, self._pem().decode() + _others(folder, self))

    def _pem(self) -> bytes:
        return self.certificate.public_bytes(Encoding.PEM)


def _others(folder: Path, own: Authority) -> str:
    """The folder's other authorities that have not expired, in PEM.

    They are still trusted because, during a change of the authority, some processes have
    certificates of the old one.
    """
    try:
        found = x509.load_pem_x509_certificates((folder / AUTHORITIES).read_bytes())
    except (OSError, ValueError):
        return ""
    now = datetime.now(UTC)
    return "".join(
        each.public_bytes(Encoding.PEM).decode()
        for each in dict.fromkeys(found)
        if each != own.certificate and each.not_valid_after_utc > now
    )


def _subject(identity: ProcessIdentity) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, str(identity)[-64:])])


def _dated(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: float
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    ends = now + timedelta(days=days)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(now, ends) - _CLOCK_SKEW)
        .not_valid_after(ends)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name.strip("[]")))
    except ValueError:
        return x509.DNSName(name)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
