"""Which role an operator needs for which method of AdminService, in one table.

A role may do all that the roles below it may. A method that is not in the table may be called by
nobody.
"""

from __future__ import annotations

from collections.abc import Mapping
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
    """Why `who`, who has this role, may not call this method; empty: who may.

    None: no role.
    """
    needed = NEEDED.get(method)
    if needed is None:
        return f"{method} is for nobody"
    if role is not None and role >= needed:
        return ""
    return f"{method} needs the role {needed}; {who} has {role or 'none'}"
