"""`pdmesh certs`: makes a certificate authority for a mesh, and certificates for its processes."""

from __future__ import annotations

import argparse
from pathlib import Path

from pdmesh.cli.errors import CommandFailed
from pdmesh.core.access.process_identity import TRUST_DOMAIN, ProcessIdentity, folder_of
from pdmesh.errors import BadCertificates
from pdmesh.launcher.state import make_private
from pdmesh.net.tls.authority import Authority


def run(options: argparse.Namespace) -> int:
    identities = [_identity(text) for text in options.processes]
    root: Path = options.out or options.state_dir / "tls"
    if options.out is None:
        make_private(options.state_dir)
    try:
        authority = Authority.opened(root)
        for identity in identities:
            folder = folder_of(root, identity)
            authority.issue(identity, folder, options.name, options.days)
            print(folder)
    except BadCertificates as exc:
        raise CommandFailed(exc.message) from exc
    except ValueError as exc:  # a name that is not possible in a certificate
        raise CommandFailed(f"--name: {exc}") from exc
    except OverflowError as exc:
        raise CommandFailed(f"--days: {exc}") from exc
    return 0


def _identity(text: str) -> ProcessIdentity:
    try:
        return ProcessIdentity.from_uri(f"spiffe://{TRUST_DOMAIN}/{text}")
    except ValueError as exc:
        raise CommandFailed(f"{text!r} is not ROLE/ID, such as prefill/prefill-0", 2) from exc
