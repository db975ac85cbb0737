"""An ACL file of Redis or Valkey, made from the table of roles: one user for each service.

A user is named as its service. The file has no password, only the SHA-256 of each.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

from pdmesh.server_permissions.role_permissions import REDIS_ROLES, RedisAccess


def redis_acl(passwords: Mapping[str, str]) -> str:
    """The file's text; nobody else may connect.

    Raises ValueError: a role has no access to Redis, or its password is empty.
    """
    lines = ["user default off resetpass"]
    for role, password in sorted(passwords.items()):
        if role not in REDIS_ROLES:
            raise ValueError(f"{role} does not use Redis, only {', '.join(sorted(REDIS_ROLES))}")
        if not password:
            raise ValueError(f"{role}: the password is empty")
        lines.append(_user(role, password, REDIS_ROLES[role]))
    return "\n".join(lines) + "\n"


def server_user(name: str, password: str, commands: Iterable[str]) -> str:
    """A line for a server that connects to another one: all channels, but no keys."""
    digest = hashlib.sha256(password.encode()).hexdigest()
    allowed = " ".join(f"+{command}" for command in commands)
    return f"user {name} on resetpass #{digest} resetkeys allchannels -@all {allowed}\n"


def _user(role: str, password: str, access: RedisAccess) -> str:
    digest = hashlib.sha256(password.encode()).hexdigest()
    kind = "%R~" if access.only_reads else "~"
    keys = " ".join(f"{kind}{pattern}" for pattern in access.keys)
    commands = " ".join(f"+{command}" for command in access.commands)
    return f"user {role} on resetpass #{digest} resetkeys {keys} resetchannels -@all {commands}"
