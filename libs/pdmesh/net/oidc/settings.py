"""The environment of services that accept tokens of an OpenID provider."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from pdmesh.config import JsonObject, ServiceSettings, shared
from pdmesh.core.access.claims import ClaimNames
from pdmesh.core.access.exposure import lacks_https
from pdmesh.core.access.key_refresh import KeyRefresh
from pdmesh.core.access.operator_roles import ROLES
from pdmesh.core.tenancy.tenant import TenantEntry
from pdmesh.net.oidc.keys import ALGORITHMS
from pdmesh.net.oidc.provider import KeySource
from pdmesh.net.oidc.verifier import TokenRules, TokenVerifier

_RoleName = Literal["viewer", "operator", "admin"]
_DEFAULT_ROLES: Final[dict[str, _RoleName]] = {
    "pdmesh-viewer": "viewer",
    "pdmesh-operator": "operator",
    "pdmesh-admin": "admin",
}


def _algorithm(name: str) -> str:
    if name not in ALGORITHMS:
        raise ValueError(
            f"must be one of {', '.join(ALGORITHMS)}; symmetric ones and none are refused"
        )
    return name


class ClaimedLimits(JsonObject):
    """The limits of a tenant whose token states none. Null means no limit."""

    requests_per_s: float | None = Field(None, gt=0)
    tokens_per_min: float | None = Field(None, gt=0)
    max_concurrent: int | None = Field(None, gt=0)
    tokens_per_day: int | None = Field(None, gt=0)
    weight: int = Field(1, gt=0)
    priority: int = Field(1, ge=0)


class OidcSettings(ServiceSettings):
    """A service accepts tokens if `oidc_issuer` is set."""

    oidc_issuer: str = shared(
        "",
        description="OpenID provider whose tokens are accepted beside API keys, as its tokens name "
        "it (https://id.example.org/realms/mesh); none: no tokens",
    )
    oidc_audience: str = shared(
        "", description="What a token's aud must contain; needed with oidc_issuer"
    )
    oidc_jwks_url: str = shared(
        "",
        description="Where the provider's keys are; default: as its "
        "/.well-known/openid-configuration says",
    )
    oidc_ca_file: Path | None = shared(
        None, description="Authorities of the provider's certificate; default: the system's"
    )
    oidc_algorithms: list[Annotated[str, AfterValidator(_algorithm)]] = shared(
        list(ALGORITHMS), description="Algorithms of tokens, as JSON; only asymmetric ones"
    )
    oidc_leeway_s: float = shared(
        30.0, ge=0, le=600, description="How far the provider's clock may be off"
    )
    oidc_refresh_s: float = shared(
        300.0, gt=0, description="Interval of fetching the provider's keys"
    )
    oidc_early_refresh_s: float = shared(
        10.0,
        ge=1,
        description="Shortest interval of fetching the keys early, for tokens that name an unknown "
        "key",
    )
    oidc_tenant_claim: str = shared(
        "tenant",
        min_length=1,
        description="Claim with the tenant's name; dots lead into objects (realm_access.tenant)",
    )
    oidc_limits_claim: str = shared(
        "",
        description="Claim with the tenant's limits, an object as in the key file; a tenant in the "
        "key file has the limits from there",
    )
    oidc_default_limits: ClaimedLimits = shared(
        ClaimedLimits(),
        description="Limits of tenants whose token has none, as JSON: requests_per_s, "
        "tokens_per_min, max_concurrent, tokens_per_day, weight, priority",
    )
    oidc_role_claim: str = shared(
        "",
        description="Claim with an operator's role, a text or a list; none: tokens give no role",
    )
    oidc_roles: dict[str, _RoleName] = shared(
        _DEFAULT_ROLES,
        description="Which values of that claim give which role (viewer, operator, admin), as JSON",
    )

    @field_validator("oidc_issuer", "oidc_jwks_url")
    @classmethod
    def _is_private(cls, url: str, info: ValidationInfo) -> str:
        """Require TLS: an attacker who changes the keys in transit can make valid tokens."""
        if url and (problem := _problem(url, is_trusted=bool(info.data.get("insecure_network")))):
            raise PydanticCustomError("url", "{problem}", {"problem": problem})
        return url

    @field_validator("oidc_audience")
    @classmethod
    def _is_for_somebody(cls, audience: str, info: ValidationInfo) -> str:
        """Require an audience, so that the provider's tokens for other services are refused."""
        if info.data.get("oidc_issuer") and not audience:
            raise PydanticCustomError("audience", "needed with oidc_issuer")
        return audience

    @property
    def claim_names(self) -> ClaimNames:
        return ClaimNames(
            tenant=self.oidc_tenant_claim,
            limits=self.oidc_limits_claim,
            role=self.oidc_role_claim,
            roles={value: ROLES[name] for value, name in self.oidc_roles.items()},
            default=TenantEntry(**self.oidc_default_limits.model_dump()),
        )

    def token_verifier(self) -> TokenVerifier | None:
        """None if the service accepts no tokens."""
        if not self.oidc_issuer:
            return None
        algorithms = tuple(self.oidc_algorithms)
        rules = TokenRules(self.oidc_issuer, self.oidc_audience, algorithms, self.oidc_leeway_s)
        source = KeySource(self.oidc_issuer, self.oidc_jwks_url, self.oidc_ca_file)
        refresh = KeyRefresh(self.oidc_refresh_s, self.oidc_early_refresh_s)
        return TokenVerifier(rules, source.fetch, refresh)


def _problem(url: str, *, is_trusted: bool) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("https", "http") or not parts.hostname or parts.username:
        return "must be of the form https://host/path"
    if lacks_https(parts.scheme, parts.hostname, is_trusted=is_trusted):
        return "must begin with https://, unless it is on this machine"
    return ""
