"""Decides the role of an operator who shows no token, and the role that each method needs.

The methods are those of AdminService, in one table. A role may do all that the roles below it may.
Nobody may call a method that is not in the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from types import MappingProxyType
from typing import Final


class AdminRole(IntEnum):
    """VIEWER reads. OPERATOR keeps running what an admin wants. ADMIN decides what runs."""

    VIEWER = 1
    OPERATOR = 2
    ADMIN = 3

    def __str__(self) -> str:
        return self.name.lower()


ROLES: Final[Mapping[str, AdminRole]] = MappingProxyType({str(role): role for role in AdminRole})


@dataclass(frozen=True, slots=True)
class ShownRole:
    """`by`: `certificate`, or `local` (the caller's address alone). `role` None: it gives none."""

    by: str
    role: AdminRole | None


def role_without_token(
    *, has_admin_token: bool, certificate_role: str | None, is_local: bool
) -> ShownRole | None:
    """The role of an operator who shows neither a token nor a key; None: the call is refused.

    If the mesh has an admin token, the call is always refused. Otherwise the certificate decides,
    and without mutual TLS (`certificate_role` None) callers on this machine are admins.
    """
    if has_admin_token:
        return None
    if certificate_role is not None:
        return ShownRole("certificate", ROLES.get(certificate_role))
    return ShownRole("local", AdminRole.ADMIN) if is_local else None


NEEDED: Final[Mapping[str, AdminRole]] = MappingProxyType(
    {
        "GetDesired": AdminRole.VIEWER,
        "ListDesiredVersions": AdminRole.VIEWER,
        "DiffDesired": AdminRole.VIEWER,
        "ListGroupStates": AdminRole.VIEWER,
        "GetUsage": AdminRole.VIEWER,
        "GetOverview": AdminRole.VIEWER,
        "GetHistory": AdminRole.VIEWER,
        "GetRequestStory": AdminRole.VIEWER,
        "ListPins": AdminRole.VIEWER,
        "ListAdapters": AdminRole.VIEWER,
        "CordonInstance": AdminRole.OPERATOR,
        "UncordonInstance": AdminRole.OPERATOR,
        "PlanMoves": AdminRole.OPERATOR,
        "PromoteUpgrade": AdminRole.OPERATOR,
        "RollbackDesired": AdminRole.OPERATOR,
        "AddPin": AdminRole.OPERATOR,
        "RemovePin": AdminRole.OPERATOR,
        "ApplyDesired": AdminRole.ADMIN,
        "AddAdapter": AdminRole.ADMIN,
        "RemoveAdapter": AdminRole.ADMIN,
    }
)


def changes(method: str) -> bool:
    """Whether the method may change the mesh, so that its calls are audited."""
    return NEEDED[method] > AdminRole.VIEWER


def refusal(method: str, role: AdminRole | None, who: str) -> str:
    """Why `who`, who has this role (None: no role), may not call this method; empty if allowed."""
    needed = NEEDED.get(method)
    if needed is None:
        return f"{method} may be called by nobody"
    if role is not None and role >= needed:
        return ""
    return f"{method} needs the role {needed}; {who} has {role or 'none'}"
