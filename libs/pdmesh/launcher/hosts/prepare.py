"""Writes a folder for each host, and a folder with the mesh's certificate authorities and secrets.

A second run keeps the authorities and the secrets, and makes new certificates. Run it again after
hosts were added, and before the certificates expire.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Final

from pdmesh.atomic_file import write_atomically
from pdmesh.core.access.operator_roles import AdminRole
from pdmesh.core.access.process_identity import ProcessIdentity, folder_of
from pdmesh.errors import BadCertificates
from pdmesh.launcher.hosts.folder import (
    REPLICA_USER,
    SENTINEL_USER,
    HostFolder,
    MeshSecrets,
    host_spec,
    nats_of,
    redis_of,
    viewer_of,
)
from pdmesh.launcher.hosts.layout import Layout
from pdmesh.launcher.spec import MeshSpec, planned_services
from pdmesh.net.tls.authority import Authority
from pdmesh.server_permissions.nats_accounts import Holder, nats_accounts
from pdmesh.server_permissions.redis_acl import redis_acl, server_user
from pdmesh.server_permissions.role_permissions import REDIS_ROLES

AUTHORITY: Final = "authority"  # this folder stays with the operator and is copied to no host
ADMIN: Final = ProcessIdentity(str(AdminRole.ADMIN), "operator")

# `_REPLICA` has the commands that a replica sends to its primary. `_SENTINEL` has the commands that
# a sentinel sends to the servers that it watches (redis.io).
_REPLICA: Final = ("psync", "replconf", "ping")
_SENTINEL: Final = (
    *("multi", "exec", "ping", "info", "role", "publish", "subscribe", "slaveof", "replicaof"),
    *("config|rewrite", "client|setname", "client|kill", "script|kill"),
)
# A sentinel accepts the commands `_OF_SENTINELS` from other sentinels, and `_OF_CLIENTS` from
# clients, which look for the primary.
_OF_SENTINELS: Final = (
    *("hello", "ping", "info", "role", "publish", "subscribe", "client|setname"),
    "sentinel",
)
_OF_CLIENTS: Final = (
    *("hello", "ping", "client|setname"),
    *("sentinel|masters", "sentinel|master", "sentinel|get-master-addr-by-name"),
    *("sentinel|replicas", "sentinel|slaves", "sentinel|sentinels"),
)


def prepare(layout: Layout, out: Path, days: float) -> list[Path]:
    """Write the folders of all hosts, and return them. Raises BadCertificates, OSError."""
    out.mkdir(mode=0o700, parents=True, exist_ok=True)
    root = out / AUTHORITY
    authority = Authority.opened(root / "mesh")
    of_cluster = Authority.opened(root / "cluster")
    known = _secrets(root / "secrets.json")
    accounts = nats_accounts(_holders(layout))
    authority.issue(ADMIN, folder_of(out, ADMIN), days=days)
    folders = [HostFolder(out / name, name, layout, known) for name in layout.hosts]
    for folder in folders:
        folder.path.mkdir(mode=0o700, exist_ok=True)
        folder.write()
        for identity in _identities(layout, folder.name):
            authority.issue(identity, folder_of(folder.tls_dir, identity), days=days)
        if folder.has_servers:
            _prepare_servers(folder, authority, of_cluster, days)
            write_atomically(folder.path / "accounts.conf", accounts)
    return [folder.path for folder in folders]


def _prepare_servers(
    folder: HostFolder, authority: Authority, of_cluster: Authority, days: float
) -> None:
    name, passwords = folder.name, folder.secrets.passwords
    at = [folder.host.address]
    for identity in (nats_of(name), redis_of(name)):
        authority.issue(identity, folder_of(folder.tls_dir, identity), at, days)
    of_cluster.issue(nats_of(name), folder.path / "cluster-tls", at, days)
    write_atomically(folder.path / "redis.acl", redis_users(passwords))
    write_atomically(folder.path / "sentinel.acl", sentinel_users(passwords))


def redis_users(passwords: Mapping[str, str]) -> str:
    """The ACL file of Redis' servers: users for services, operators, replicas and sentinels."""
    return (
        redis_acl({role: passwords[role] for role in REDIS_ROLES})
        + server_user(REPLICA_USER, passwords[REPLICA_USER], _REPLICA)
        + server_user(SENTINEL_USER, passwords[SENTINEL_USER], _SENTINEL)
    )


def sentinel_users(passwords: Mapping[str, str]) -> str:
    """The ACL file of the sentinels, with users for other sentinels and for clients.

    Clients (services and operators) ask a sentinel for the primary.
    """
    users = [server_user(role, passwords[role], _OF_CLIENTS) for role in sorted(REDIS_ROLES)]
    users.append(server_user(SENTINEL_USER, passwords[SENTINEL_USER], _OF_SENTINELS))
    return "user default off resetpass\n" + "".join(users)


def _identities(layout: Layout, name: str) -> list[ProcessIdentity]:
    planned = planned_services(host_spec(name, layout.hosts[name], MeshSpec()))
    return [viewer_of(name), *(each.identity for each in planned)]


def _holders(layout: Layout) -> list[Holder]:
    """The NATS users of all hosts: every process, and the operators' commands."""
    everyone = [each for name in layout.hosts for each in _identities(layout, name)]
    return [Holder.of(each) for each in (*everyone, ADMIN)]


def _secrets(file: Path) -> MeshSecrets:
    """Read the secrets, or make them in the first run. Raises BadCertificates, OSError."""
    users = (*REDIS_ROLES, REPLICA_USER, SENTINEL_USER)
    try:
        found = MeshSecrets(**json.loads(file.read_text()))
    except FileNotFoundError:
        new = secrets.token_hex
        found = MeshSecrets(new(32), new(32), {user: new(16) for user in users})
        write_atomically(file, json.dumps(asdict(found)) + "\n")
    except (ValueError, TypeError) as exc:
        raise BadCertificates(f"{file} holds no secrets of a mesh") from exc
    return found
