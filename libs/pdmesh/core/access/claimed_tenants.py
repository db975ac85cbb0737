"""Decides a tenant's limits from its tokens: the limits in the newest token apply.

A tenant is the customer that keys and limits belong to. An identity provider writes the limits into
each token, so two tokens of one tenant may differ. Gateways share a tenant's limits. So all
gateways must find the same limits, whichever tokens they see.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pdmesh.core.tenancy.limits import Tenant

MAX_TENANTS: Final = 10_000


class ClaimedTenants:
    """The tenants of the tokens that this gateway has seen, at most `most` of them.

    When there are more, the tenant whose last token is oldest is removed. A tenant whose tokens
    have expired is kept: this gateway may still hold parts of the tenant's limits, and must hand
    them over to other gateways.
    """

    def __init__(self, most: int = MAX_TENANTS) -> None:
        self._most = most
        self._found: dict[str, tuple[float, Tenant]] = {}
        self.tenants: Mapping[str, Tenant] = {}

    def heed(self, tenant: Tenant, issued_at: float) -> Tenant:
        """Record the tenant that a token names. Return the tenant with the limits that apply."""
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
