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

_COMMANDS: Final = ProcessIdentity(OPERATOR, "local")
_LOCAL: Final = ("localhost", "127.0.0.1", "::1")


def issue(root: Path, processes: Iterable[ProcessSpec], inner_host: str) -> CertificateFolder:
    """Write a certificate for each process, and return that of commands.

    Raises BadCertificates, OSError.
    """
    authority = Authority.opened(root)
    for identity in (_COMMANDS, *(ProcessIdentity(p.service, p.name) for p in processes)):
        authority.issue(identity, folder_of(root, identity), (*_LOCAL, inner_host))
    return CertificateFolder(folder_of(root, _COMMANDS))
