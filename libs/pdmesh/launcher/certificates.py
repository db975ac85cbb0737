"""The certificates of a mesh that `pdmesh up --tls` starts, made anew at each start: one for each
process, and one for commands on this machine.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from pdmesh.core.identity import OPERATOR, ProcessIdentity, folder_of
from pdmesh.launcher.spec import ProcessSpec
from pdmesh.net.tls.authority import Authority
from pdmesh.net.tls.folder import CertificateFolder

_NATS: Final = ProcessIdentity("nats", "nats")
_COMMANDS: Final = ProcessIdentity(OPERATOR, "local")
_LOCAL: Final = ("localhost", "127.0.0.1", "::1")


class MeshCertificates:
    """Raises BadCertificates, OSError."""

    def __init__(self, root: Path, processes: Iterable[ProcessSpec], inner_host: str) -> None:
        authority = Authority.opened(root)
        others = (ProcessIdentity(p.service, p.name) for p in processes)
        for identity in (_COMMANDS, _NATS, *others):
            authority.issue(identity, folder_of(root, identity), (*_LOCAL, inner_host))
        self.of_commands = CertificateFolder(folder_of(root, _COMMANDS))
        self._of_nats = CertificateFolder(nats_folder(root))
        self._read_by_nats = self._of_nats.latest()

    def is_renewal_due(self) -> bool:
        """Whether NATS has a new certificate. It reads the files only when it is told to."""
        before, self._read_by_nats = self._read_by_nats, self._of_nats.latest()
        return before is not self._read_by_nats


def nats_folder(root: Path) -> Path:
    return folder_of(root, _NATS)
