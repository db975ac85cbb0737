"""Reads and writes the key file: tenants with their limits, and a SHA-256 for each API key.

A key is `pdm_<id>_<secret>`. The secret has 256 random bits. So a fast hash is as safe as a slow
one, and nobody can find a key from the file. A key's entry is found by the id. The secret's hash is
compared in constant time, even for an unknown id.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from pdmesh.atomic_file import write_atomically
from pdmesh.core.access.operator_roles import ROLES, AdminRole
from pdmesh.core.tenancy.limits import Tenant
from pdmesh.core.tenancy.tenant import NAME, TenantEntry

_PREFIX: Final = "pdm"
_MAX_TOKEN_CHARS: Final = 128
_NO_HASH: Final = bytes(32)


class BadKeyFile(Exception):
    """A key file cannot be used. The message is one line with the file and its problem."""


class KeyEntry(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """One key. Times are in seconds since 1970."""

    key_id: str
    tenant: str
    sha256: str  # the secret's hash, in hex
    created_at: int
    expires_at: int | None = None
    role: str | None = None  # an operator's key: viewer, operator or admin


class KeyFile(msgspec.Struct, forbid_unknown_fields=True):
    tenants: dict[str, TenantEntry] = {}
    keys: list[KeyEntry] = []


def load(path: Path) -> KeyFile:
    """Raises BadKeyFile."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=KeyFile)
    except OSError as exc:
        raise BadKeyFile(f"cannot read {path}: {exc.strerror}") from exc
    except (msgspec.DecodeError, ValueError) as exc:
        raise BadKeyFile(f"{path} is not a key file: {exc}") from exc
    _check(found, path)
    return found


def _check(file: KeyFile, path: Path) -> None:
    for name, tenant in file.tenants.items():
        if not NAME.fullmatch(name):
            raise BadKeyFile(f"{path}: {name!r} is not a tenant name ([a-z0-9-], at most 63)")
        if not tenant.has_valid_limits():
            raise BadKeyFile(f"{path}: the limits of tenant {name} are not positive numbers")
    for key in file.keys:
        if key.tenant not in file.tenants:
            raise BadKeyFile(f"{path}: key {key.key_id} belongs to an unknown tenant, {key.tenant}")
        if not re.fullmatch(r"[0-9a-f]{64}", key.sha256):
            raise BadKeyFile(f"{path}: key {key.key_id} has no SHA-256 of 64 hex digits")
        if key.role is not None and key.role not in ROLES:
            raise BadKeyFile(f"{path}: key {key.key_id}: the role is one of {', '.join(ROLES)}")


def difference(before: KeyFile, after: KeyFile) -> tuple[dict[str, Any], dict[str, Any]]:
    """The entries of the tenants and keys that differ, before and after, without hashes."""
    told = _told(before), _told(after)
    kinds = ("tenants", "keys")
    one, other = (
        {
            kind: {
                name: value for name, value in mine[kind].items() if yours[kind].get(name) != value
            }
            for kind in kinds
        }
        for mine, yours in (told, told[::-1])
    )
    return one, other


def _told(file: KeyFile) -> dict[str, dict[str, Any]]:
    keys = {
        key.key_id: {"tenant": key.tenant, "role": key.role, "expires_at": key.expires_at}
        for key in file.keys
    }
    return {
        "tenants": {n: msgspec.structs.asdict(t) for n, t in file.tenants.items()},
        "keys": keys,
    }


def save(path: Path, file: KeyFile) -> None:
    """Write the file atomically. Only this user can read it. Raises OSError."""
    write_atomically(path, msgspec.json.format(msgspec.json.encode(file)).decode() + "\n")


def issue(
    file: KeyFile, tenant: str, expires_at: int | None = None, role: AdminRole | None = None
) -> str:
    """Add a new key for `tenant`, and the tenant if it is new. Returns the key.

    The key cannot be read from the file later. With a `role`, the key may also call the admin API
    in this operator's role.
    """
    file.tenants.setdefault(tenant, TenantEntry())
    key_id, secret = secrets.token_hex(4), secrets.token_urlsafe(32)
    entry = KeyEntry(key_id, tenant, _sha256(secret).hex(), int(time.time()), expires_at)
    entry.role = None if role is None else str(role)
    file.keys.append(entry)
    return f"{_PREFIX}_{key_id}_{secret}"


def revoke(file: KeyFile, key_id: str) -> bool:
    """Remove a key. Returns False if there is no key with this id."""
    kept = [key for key in file.keys if key.key_id != key_id]
    is_found, file.keys = len(kept) < len(file.keys), kept
    return is_found


def _sha256(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()


@dataclass(frozen=True, slots=True)
class KeyHolder:
    """The holder of a key. `role` is an operator's role, or None if the key is for clients only."""

    key_id: str
    tenant: Tenant
    role: AdminRole | None


def is_key(token: str) -> bool:
    """Whether the token has the form of a key, valid or not."""
    return token.startswith(f"{_PREFIX}_")


class Keyring:
    """The keys of a file, for look-ups."""

    def __init__(self, file: KeyFile) -> None:
        self.tenants = {name: entry.tenant(name) for name, entry in file.tenants.items()}
        self._keys = {
            key.key_id: (bytes.fromhex(key.sha256), self._holder(key), key.expires_at)
            for key in file.keys
        }

    def _holder(self, key: KeyEntry) -> KeyHolder:
        role = None if key.role is None else ROLES[key.role]
        return KeyHolder(key.key_id, self.tenants[key.tenant], role)

    def __len__(self) -> int:
        return len(self._keys)

    def holder(self, token: str, now: float) -> KeyHolder | None:
        """The key's holder, or None for an unknown or expired key. `now` is seconds since 1970."""
        parts = token.split("_", 2)
        if len(token) > _MAX_TOKEN_CHARS or len(parts) != 3 or parts[0] != _PREFIX:
            return None
        expected, holder, expires_at = self._keys.get(parts[1], (_NO_HASH, None, None))
        is_equal = hmac.compare_digest(_sha256(parts[2]), expected)
        if not is_equal or (expires_at is not None and now >= expires_at):
            return None
        return holder

    def find(self, token: str, now: float) -> Tenant | None:
        """The key's tenant, or None for an unknown or expired key. `now` is seconds since 1970."""
        holder = self.holder(token, now)
        return None if holder is None else holder.tenant
