"""Decides the role of an operator who shows no token, and the role that each method needs.

The methods belong to AdminService, and one table lists them all. A role may also do what lower
roles may do. A method that is not in the table may not be called.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from types import MappingProxyType
from typing import Final


class AdminRole(IntEnum):
    """A VIEWER reads. An OPERATOR keeps the mesh running. An ADMIN decides what runs."""

    VIEWER = 1
    OPERATOR = 2
    ADMIN = 3

    def __str__(self) -> str:
        return self.name.lower()


ROLES: Final[Mapping[str, AdminRole]] = MappingProxyType({str(role): role for role in AdminRole})


@dataclass(frozen=True, slots=True)
class ShownRole:
    """The role of an operator who shows no token, and how the role was found.

    `by` is `certificate`, or `local` if the role follows from the caller's address alone. `role` is
    None if the certificate gives no role.
    """

    by: str
    role: AdminRole | None


def role_without_token(
    *, has_admin_token: bool, certificate_role: str | None, is_local: bool
) -> ShownRole | None:
    """The role of an operator who shows neither a token nor a key. None means that the call is
    refused.

    If the mesh has an admin token, the call is always refused. Otherwise the certificate decides.
    Without mutual TLS, `certificate_role` is None, and every caller on this machine is an admin.
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


def refusal(method: str, role: AdminRole | None, who: str) -> str:
    """Why `who` may not call this method. The result is empty if the call is allowed.

    `role` is the caller's role, or None for a caller without a role.
    """
    needed = NEEDED.get(method)
    if needed is None:
        return f"{method} may be called by nobody"
    if role is not None and role >= needed:
        return ""
    return f"{method} needs the role {needed}; {who} has {role or 'none'}"
