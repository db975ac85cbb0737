"""Decides which limits count for a tenant whose tokens differ: those of the token issued last.

Limits belong to a tenant, not to a token, and gateways share them. So all gateways must come to the
same limits, whichever tokens they see.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pdmesh.core.tenancy.limits import Tenant

MAX_TENANTS: Final = 10_000


class ClaimedTenants:
    """At most `most` tenants; the one whose last token is oldest leaves first.

    A tenant stays when its tokens have expired: this gateway may still hold parts of its limits,
    which it must hand over.
    """

    def __init__(self, most: int = MAX_TENANTS) -> None:
        self._most = most
        self._found: dict[str, tuple[float, Tenant]] = {}
        self.tenants: Mapping[str, Tenant] = {}

    def heed(self, tenant: Tenant, issued_at: float) -> Tenant:
        """Note the tenant of a token; return the tenant with the limits that count."""
        known = self._found.get(tenant.name)
        if known is not None:
            if known[0] > issued_at:
                return known[1]
            if known[1] == tenant:
                self._found[tenant.name] = (issued_at, tenant)
                return tenant
        elif len(self._found) >= self._most:
            del self._found[min(self._found, key=lambda name: self._found[name][0])]
        self._found[tenant.name] = (issued_at, tenant)
        self.tenants = {name: found for name, (_, found) in self._found.items()}
        return tenant
