"""Makes and renews the certificates of a mesh that `pdmesh up --tls` starts.

Each process has a certificate. Commands on this machine share one more certificate. All
certificates are made at each start, and again when two thirds of their lifetime are over. NATS
treats each certificate as a separate user.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from pdmesh.atomic_file import write_atomically
from pdmesh.core.access.operator_roles import AdminRole
from pdmesh.core.access.process_identity import ProcessIdentity, folder_of
from pdmesh.launcher.spec import ProcessSpec
from pdmesh.net.tls.authority import CERTIFICATE_DAYS, Authority
from pdmesh.net.tls.certificate_renewal import CERTIFICATE, CertificateFolder
from pdmesh.server_permissions.nats_accounts import Holder, nats_accounts
from pdmesh.server_permissions.role_permissions import NATS_ROLES

_NATS: Final = ProcessIdentity("nats", "nats")
_COMMANDS: Final = ProcessIdentity(str(AdminRole.ADMIN), "local")
_LOCAL: Final = ("localhost", "127.0.0.1", "::1")
_RENEWED_AFTER: Final = timedelta(days=CERTIFICATE_DAYS * 2 / 3)


class MeshCertificates:
    """The certificates of a mesh's processes. The constructor makes them.

    Raises BadCertificates, OSError.
    """

    def __init__(
        self,
        root: Path,
        processes: Iterable[ProcessSpec],
        inner_host: str,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._root, self._names, self._now = root, (*_LOCAL, inner_host), now
        others = (ProcessIdentity(p.service, p.name) for p in processes)
        self._identities = (_COMMANDS, _NATS, *others)
        self._issue()
        self.of_commands = CertificateFolder(folder_of(root, _COMMANDS))
        self._of_nats = CertificateFolder(nats_folder(root))
        self._read_by_nats = self._of_nats.latest()

    def renew(self) -> None:
        """Replace all certificates if less than a third of their lifetime is left.

        Raises BadCertificates, OSError. After an error, the next call tries again.
        """
        if self._now() >= self._renew_at:
            self._issue()

    def _issue(self) -> None:
        issued_at = self._now()
        authority = Authority.opened(self._root)
        for identity in self._identities:
            authority.issue(identity, folder_of(self._root, identity), self._names)
        self._renew_at = issued_at + _RENEWED_AFTER

    def has_nats_a_new_one(self) -> bool:
        """Whether NATS' certificate has changed since the last call.

        NATS reads a new certificate only after a SIGHUP.
        """
        before, self._read_by_nats = self._read_by_nats, self._of_nats.latest()
        return before is not self._read_by_nats


class CertificateAccounts:
    """The file with NATS' users: one user for each certificate whose role may use NATS.

    `pdmesh certs` may add certificates while the mesh runs.
    """

    def __init__(self, root: Path, file: Path) -> None:
        self._root, self.file = root, file
        self._written = ""

    def write(self) -> bool:
        """Write the file if its content must change. Returns whether it changed. Raises OSError."""
        holders = {
            Holder(path.parent.parent.name, path.parent.name)
            for path in self._root.glob(f"*/*/{CERTIFICATE}")
            if path.parent.parent.name in NATS_ROLES
        }
        text = nats_accounts(holders)
        if text == self._written:
            return False
        self.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(self.file, text)
        self._written = text
        return True


def nats_folder(root: Path) -> Path:
    return folder_of(root, _NATS)
