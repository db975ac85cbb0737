"""Reads the claims of a valid token: the caller's tenant with its limits, and an operator's role
(OpenID Connect Core 1.0, section 2; RFC 7519).

A claim is found by its full name, which may be a URL, or by a path of names with dots
(`realm_access.roles`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

import msgspec

from pdmesh.core.access.operator_roles import ROLES, AdminRole
from pdmesh.core.tenancy.limits import Tenant
from pdmesh.core.tenancy.tenant import NAME, TenantEntry

Claims = Mapping[str, Any]
MAX_WHO_CHARS: Final = 256
_DEFAULT_ROLES: Final = MappingProxyType({f"pdmesh-{name}": role for name, role in ROLES.items()})


class BadClaims(Exception):
    """A claim has a wrong value. The message is one line, which names the claim."""

    def __init__(self, claim: str, message: str) -> None:
        super().__init__(f"claim {claim}: {message}")
        self.claim = claim


@dataclass(frozen=True, slots=True)
class ClaimNames:
    """The names of the claims that hold the tenant, its limits and an operator's role.

    If `limits` or `role` is empty, no claim is read for it. `roles` maps each value of the claim
    `role` to a role. `default` holds the limits of a tenant whose token has none.
    """

    tenant: str = "tenant"
    limits: str = ""
    role: str = ""
    roles: Mapping[str, AdminRole] = field(default_factory=lambda: _DEFAULT_ROLES)
    default: TenantEntry = field(default_factory=TenantEntry)


def claim_of(claims: Claims, name: str) -> Any:
    """The value of a claim. None means that the claim is absent or null."""
    if name in claims:
        return claims[name]
    found: Any = claims
    for part in name.split("."):
        if not isinstance(found, Mapping):
            return None
        found = found.get(part)
    return found


def tenant_of(claims: Claims, names: ClaimNames) -> Tenant:
    """The tenant that a token names, with its limits. Raises BadClaims."""
    name = claim_of(claims, names.tenant)
    if name is None:
        raise BadClaims(names.tenant, "the token has none, so it belongs to no tenant")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise BadClaims(names.tenant, "not a tenant's name ([a-z0-9-], at most 63)")
    found = claim_of(claims, names.limits) if names.limits else None
    return _entry(found, names).tenant(name)


def _entry(found: Any, names: ClaimNames) -> TenantEntry:
    if found is None:
        return names.default
    try:
        entry = msgspec.convert(found, TenantEntry)
    except msgspec.ValidationError as exc:
        raise BadClaims(names.limits, str(exc)) from exc
    if not entry.has_valid_limits():
        raise BadClaims(names.limits, "the limits are not positive numbers")
    return entry


def role_of(claims: Claims, names: ClaimNames) -> AdminRole | None:
    """The highest role that the claim gives, or None if it gives no role."""
    if not names.role:
        return None
    found = claim_of(claims, names.role)
    values = found if isinstance(found, list) else [found]
    given = [names.roles[v] for v in values if isinstance(v, str) and v in names.roles]
    return max(given, default=None)


def who_of(claims: Claims) -> str:
    """The caller's name for people and logs: the token's subject, and in parentheses an email or
    user name.

    Only the subject is unique.
    """
    subject = str(claims.get("sub", ""))
    name = next((str(claims[c]) for c in ("email", "preferred_username") if claims.get(c)), "")
    shown = f"{subject} ({name})" if name and name != subject else subject
    return "".join(c for c in shown if c.isprintable())[:MAX_WHO_CHARS]
