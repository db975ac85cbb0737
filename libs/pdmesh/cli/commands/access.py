"""`pdmesh access`: prints the processes' permissions as files for the user's own NATS and Redis."""

from __future__ import annotations

import argparse
from pathlib import Path

from pdmesh.cli.errors import CommandFailed
from pdmesh.core.access.process_identity import ProcessIdentity
from pdmesh.server_permissions.nats_accounts import Holder, nats_accounts
from pdmesh.server_permissions.redis_acl import redis_acl
from pdmesh.server_permissions.role_permissions import NATS_ROLES


def run(options: argparse.Namespace) -> int:
    try:
        text = _accounts(options) if options.action == "nats" else _users(options)
    except ValueError as exc:
        raise CommandFailed(str(exc), 2) from exc
    print(text, end="")
    return 0


def _accounts(options: argparse.Namespace) -> str:
    named = options.holders or sorted(NATS_ROLES)
    return nats_accounts([_holder(each, options.trust_domain) for each in named])


def _holder(text: str, trust_domain: str) -> Holder:
    """Raises ValueError."""
    if "/" not in text:
        # This call only checks the role's name and the trust domain.
        ProcessIdentity.from_uri(f"spiffe://{trust_domain}/{text}/any")
        return Holder(text, trust_domain=trust_domain)
    return Holder.of(ProcessIdentity.from_uri(f"spiffe://{trust_domain}/{text}"))


def _users(options: argparse.Namespace) -> str:
    """Raises ValueError."""
    return redis_acl({role: _password(role, Path(file)) for role, file in options.passwords})


def _password(role: str, file: Path) -> str:
    """Raises ValueError."""
    try:
        return file.read_text().strip()
    except OSError as exc:
        raise ValueError(f"{role}: {file}: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise ValueError(f"{role}: {file} is not text") from exc
