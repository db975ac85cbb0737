"""The certificate of this process. Its gRPC servers and its connections use it for mutual TLS."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdmesh.core.access.process_identity import ProcessIdentity
    from pdmesh.net.tls.certificate_renewal import CertificateFolder


class _Own:
    folder: CertificateFolder | None = None
    has_nats_roles = False


def use_certificates(folder: CertificateFolder | None, *, nats_roles: bool = False) -> None:
    """Set the certificates for the gRPC servers and the connections of this process. None: no TLS.

    Call this before the first server or connection is made. `nats_roles` says that NATS identifies
    processes by their certificates and gives each role its own permissions.
    """
    _Own.folder, _Own.has_nats_roles = folder, nats_roles and folder is not None


def own_certificates() -> CertificateFolder | None:
    return _Own.folder


def role_at_nats() -> ProcessIdentity | None:
    """The identity of this process at NATS. None if NATS has no permissions by role."""
    folder = _Own.folder
    return folder.identity if folder is not None and _Own.has_nats_roles else None


@contextlib.contextmanager
def using_certificates(
    folder: CertificateFolder | None, *, nats_roles: bool = False
) -> Iterator[None]:
    """Like `use_certificates`, while the block runs."""
    before = _Own.folder, _Own.has_nats_roles
    use_certificates(folder, nats_roles=nats_roles)
    try:
        yield
    finally:
        _Own.folder, _Own.has_nats_roles = before
