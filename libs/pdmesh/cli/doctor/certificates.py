"""Examines the certificate of `pdmesh`'s commands, and the certificates at the mesh's ports."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from pdmesh.cli.doctor.diagnosis import Diagnosis, ok, problem, warning
from pdmesh.core.access.process_identity import OPERATORS, ProcessIdentity
from pdmesh.errors import BadCertificates
from pdmesh.v1.common_pb2 import InstanceRecord

if TYPE_CHECKING:
    from pdmesh.net.tls.certificate_renewal import CertificateFolder

_SUBJECT: Final = "certificates"
_SOON: Final = timedelta(days=1)  # the same limit as in the alert PdmeshCertificateEnds
_HANDSHAKE_S: Final = 5.0
# OpenSSL's error codes. Any other code counts as a problem with the issuer.
_NOT_YET, _EXPIRED, _WRONG_USE, _WRONG_NAME, _WRONG_ADDRESS = 9, 10, 26, 62, 64
_RENEW: Final = "see why nothing renews it (cert-manager, or pdmesh certs by hand)"


@dataclass(frozen=True, slots=True)
class Port:
    """A port with TLS. `must_name` is the DNS name or address that its certificate must have."""

    name: str  # the name of the process
    host: str
    number: int
    must_name: str


@dataclass(frozen=True, slots=True)
class Shown:
    """The result of a TLS handshake with a port.

    `ends_at` is the end of an accepted certificate. `code` and `why` are set if the certificate was
    not accepted. None of these is set if the port did not answer.
    """

    port: Port
    ends_at: datetime | None
    code: int = 0  # OpenSSL's error code if the certificate is not accepted, else 0
    why: str = ""


def own_certificate(tls_dir: str) -> tuple[CertificateFolder | None, list[Diagnosis]]:
    """Examine the certificate of `pdmesh`'s commands.

    Returns the certificate, or None if it is not usable, and the findings.
    """
    from pdmesh.net.tls.certificate_renewal import CertificateFolder

    if not tls_dir:
        return None, []
    try:
        folder = CertificateFolder(Path(tls_dir))
    except BadCertificates as exc:
        remedy = "make another: pdmesh certs operator/NAME, or correct PDMESH_TLS_DIR"
        return None, [problem(_SUBJECT, exc.message, remedy)]
    return folder, [of_own(folder.identity, folder.latest().expires_at, datetime.now(UTC))]


def of_own(identity: ProcessIdentity, ends_at: datetime, now: datetime) -> Diagnosis:
    if identity.role not in OPERATORS:
        text = f"the commands' certificate is for {identity}, whom masters refuse"
        return problem(_SUBJECT, text, "set PDMESH_TLS_DIR to one of operator/NAME")
    return _of_end(f"the commands' certificate, {identity},", ends_at, now)


def ports_of(
    records: Iterable[InstanceRecord], own: ProcessIdentity, nats_url: str
) -> Iterator[Port]:
    """The port of NATS, if it has TLS, and the gRPC ports of all processes except gateways."""
    nats = urlsplit(nats_url)
    if nats.scheme == "tls" and nats.hostname:
        yield Port("nats", nats.hostname, nats.port or 4222, nats.hostname)
    for record in records:
        host, _, number = record.grpc_address.rpartition(":")
        if number.isdecimal() and record.service != "gateway":
            peer = replace(own, role=record.service, instance_id=record.instance_id)
            yield Port(record.instance_id, host.strip("[]"), int(number), peer.dns_name)


async def examine_ports(folder: CertificateFolder, ports: Iterable[Port]) -> list[Diagnosis]:
    shown = await asyncio.gather(*(look_at(port, folder) for port in ports))
    return list(of_ports(shown, datetime.now(UTC)))


async def look_at(port: Port, folder: CertificateFolder) -> Shown:
    """Make one handshake. If the port does not answer, other checks report that."""
    from pdmesh.net.tls.contexts import client_context

    try:
        context = client_context(folder)
        context.set_alpn_protocols(["h2"])
        async with asyncio.timeout(_HANDSHAKE_S):
            _, writer = await asyncio.open_connection(
                port.host, port.number, ssl=context, server_hostname=port.must_name
            )
    except ssl.SSLCertVerificationError as exc:
        return Shown(port, None, exc.verify_code, exc.verify_message)
    except (OSError, TimeoutError):
        return Shown(port, None)
    try:
        certificate = writer.get_extra_info("peercert")
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    seconds = ssl.cert_time_to_seconds(certificate["notAfter"])
    return Shown(port, datetime.fromtimestamp(seconds, UTC))


def of_ports(shown: Iterable[Shown], now: datetime) -> Iterator[Diagnosis]:
    """One diagnosis for each port with a problem or warning, and a single one for all others."""
    fine: list[datetime] = []
    for each in shown:
        if each.code:
            yield problem(_SUBJECT, f"{each.port.name} shows {each.why}", _remedy(each))
        elif each.ends_at is not None:
            found = _of_end(f"the certificate of {each.port.name}", each.ends_at, now)
            if found.remedy:
                yield found
            else:
                fine.append(each.ends_at)
    if fine:
        ends = f"the first ends on {min(fine):%Y-%m-%d}"
        yield ok(_SUBJECT, f"{len(fine)} ports show the right certificates; {ends}")


def _remedy(shown: Shown) -> str:
    if shown.code == _EXPIRED:
        return _RENEW
    if shown.code == _NOT_YET:
        return "compare the clocks of both machines"
    if shown.code == _WRONG_USE:
        return "its certificate needs the extended key usages server auth and client auth"
    if shown.code in {_WRONG_NAME, _WRONG_ADDRESS}:
        return f"its certificate must name {shown.port.must_name}: make one for this process"
    return "put the authority that issued it into ca.crt here, or let ours issue it"


def _of_end(whose: str, ends_at: datetime, now: datetime) -> Diagnosis:
    text = f"{whose} ends on {ends_at:%Y-%m-%d %H:%M} UTC"
    return ok(_SUBJECT, text) if ends_at - now > _SOON else warning(_SUBJECT, text, _RENEW)
