"""Certificates for tests, issued by an authority of the test."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pdmesh.core.access.process_identity import ProcessIdentity, folder_of
from pdmesh.net.tls.authority import Authority
from pdmesh.net.tls.certificate_renewal import CertificateFolder


class TestAuthority:
    """A certificate authority in its own folder.

    Authorities in different folders do not trust each other.
    """

    __test__ = False

    def __init__(self, root: Path) -> None:
        self.root = root
        self.authority = Authority.opened(root)

    def issue(
        self, role: str, instance_id: str, *, days: float = 1, names: Sequence[str] = ()
    ) -> Path:
        """Issue a certificate, which replaces an earlier one, and return its folder."""
        identity = ProcessIdentity(role, instance_id)
        folder = folder_of(self.root, identity)
        self.authority.issue(identity, folder, names, days)
        return folder

    def folder(self, role: str, instance_id: str) -> CertificateFolder:
        return CertificateFolder(self.issue(role, instance_id))
