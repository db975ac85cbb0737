"""The certificate of this process, which every connection of the process uses."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdmesh.net.tls.folder import CertificateFolder


class _Own:
    folder: CertificateFolder | None = None


def use_certificates(folder: CertificateFolder | None) -> None:
    """Set what servers and connections of this process use from now on; None: no TLS.

    Call it before the first of them is made.
    """
    _Own.folder = folder


def own_certificates() -> CertificateFolder | None:
    return _Own.folder


@contextlib.contextmanager
def using_certificates(folder: CertificateFolder | None) -> Iterator[None]:
    """As `use_certificates`, for as long as the block runs."""
    before, _Own.folder = _Own.folder, folder
    try:
        yield
    finally:
        _Own.folder = before
