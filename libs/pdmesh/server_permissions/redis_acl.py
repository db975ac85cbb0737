"""Makes the ACL file of a Redis or Valkey server from the table of roles.

The file has one user for each given role, with the role's name. It contains the SHA-256 of each
password, but no password.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

from pdmesh.server_permissions.role_permissions import REDIS_ROLES, RedisAccess


def redis_acl(passwords: Mapping[str, str]) -> str:
    """The text of the file. Only the roles in `passwords` may connect.

    Raises ValueError if a role has no access to Redis, or if its password is empty.
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
    """The line for a user with all channels and no keys, such as a replica or a sentinel."""
    digest = hashlib.sha256(password.encode()).hexdigest()
    allowed = " ".join(f"+{command}" for command in commands)
    return f"user {name} on resetpass #{digest} resetkeys allchannels -@all {allowed}\n"


def _user(role: str, password: str, access: RedisAccess) -> str:
    digest = hashlib.sha256(password.encode()).hexdigest()
    kind = "%R~" if access.only_reads else "~"
    keys = " ".join(f"{kind}{pattern}" for pattern in access.keys)
    commands = " ".join(f"+{command}" for command in access.commands)
    return f"user {role} on resetpass #{digest} resetkeys {keys} resetchannels -@all {commands}"
