"""Finds the tenant of a client that has a token of the OpenID provider."""

from __future__ import annotations

from collections.abc import Mapping

from pdmesh.core.access.claimed_tenants import ClaimedTenants
from pdmesh.core.access.claims import BadClaims, ClaimNames, tenant_of
from pdmesh.core.tenancy.limits import Tenant
from pdmesh.net.oidc.settings import OidcSettings
from pdmesh.net.oidc.verifier import TokenVerifier
from pdmesh.services.gateway.access.errors import PermissionDenied


class ClientTokens:
    """Finds the tenant of a token. `run` must run as long as tokens are checked."""

    def __init__(self, verifier: TokenVerifier, names: ClaimNames) -> None:
        self._verifier, self._names = verifier, names
        self._claimed = ClaimedTenants()

    @property
    def tenants(self) -> Mapping[str, Tenant]:
        """The tenants that tokens have named and that were not in the key file.

        Only the `MAX_TENANTS` newest are kept.
        """
        return self._claimed.tenants

    async def tenant(self, token: str, in_file: Mapping[str, Tenant]) -> Tenant:
        """The tenant of a token. If the key file has this tenant, the limits in the file apply.

        Raises PermissionDenied if the claims have no valid tenant or limits. Also raises
        InvalidToken and Unavailable.
        """
        claims = await self._verifier.claims(token)
        try:
            tenant = tenant_of(claims, self._names)
        except BadClaims as exc:
            raise PermissionDenied(str(exc)) from exc
        if (known := in_file.get(tenant.name)) is not None:
            return known
        return self._claimed.heed(tenant, float(claims.get("iat", 0)))

    async def run(self) -> None:
        await self._verifier.run()


def client_tokens(settings: OidcSettings) -> ClientTokens | None:
    """None means that no OpenID provider is set."""
    verifier = settings.token_verifier()
    return None if verifier is None else ClientTokens(verifier, settings.claim_names)
