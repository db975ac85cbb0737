"""Decides which clients may call and how much they may use, for both HTTP and gRPC.

This module checks API keys, tokens of an OpenID provider, and the limits of tenants. The key is
checked before the body of the call is read, so that a refusal costs almost no time. A permit is
permission for one call, until its answer ends. An HTTP call gets its permit before its body is
read, and a gRPC call afterwards. Without a key file and an OpenID provider, all clients are one
tenant without limits. A tenant's limit is divided into parts, each of which one gateway holds and
may grant.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import ChainMap
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Final, Protocol, TypeVar

from pdmesh import api_keys
from pdmesh.api_keys import KeyFile
from pdmesh.core.access.exposure import lacks_keys
from pdmesh.core.tenancy.limit_parts import num_parts
from pdmesh.core.tenancy.limits import (
    ANYONE,
    Charge,
    Limit,
    LimitRefused,
    Tenant,
    Tenants,
)
from pdmesh.errors import MeshError, Overloaded
from pdmesh.followed_keys import FollowedKeys
from pdmesh.net.tasks import together
from pdmesh.service_process import StartupError
from pdmesh.services.gateway.access.client_tokens import ClientTokens
from pdmesh.services.gateway.access.errors import NoApiKey, PermissionDenied, Unauthenticated
from pdmesh.services.gateway.access.tenant_ledgers import LedgerBucket, TenantLedgers
from pdmesh.telemetry import metrics, names

_DAY_S: Final = 86400
_BEARER: Final = "bearer "

_refused = metrics.counter(
    names.GATEWAY_REFUSED, "Calls refused for their key or a tenant's limits, by tenant and reason"
)
_tokens = metrics.counter(names.TENANT_TOKENS, "Tokens of finished calls, by tenant")

_MESSAGES: Final = {
    Limit.REQUEST_RATE: "too many requests for this API key's tenant",
    Limit.TOKEN_RATE: "too many tokens for this API key's tenant",
    Limit.CONCURRENCY: "too many open requests for this API key's tenant",
    Limit.QUOTA: "this API key's tenant has used up its daily tokens",
}


class RateLimited(Overloaded):
    """The call exceeds a limit of its tenant, not of the mesh."""


class Permit(Protocol):
    """The permission for one call.

    Call `charge` before the work, `settle` after it, and `leave` in every case.
    """

    @property
    def tenant(self) -> Tenant: ...

    def charge(self, num_tokens: int) -> None: ...

    async def has_more(self) -> bool:
        """Whether this gateway can now grant the tenant more than it could when `charge` refused.

        Waits for other gateways to hand over the parts of the tenant's limits that they hold.
        """
        ...

    def settle(self, num_used: int) -> None: ...

    def leave(self) -> None: ...


class _Anyone:
    tenant = ANYONE

    def charge(self, num_tokens: int) -> None: ...

    async def has_more(self) -> bool:
        return False

    def settle(self, num_used: int) -> None: ...

    def leave(self) -> None: ...


ANYONES_PERMIT: Final = _Anyone()


class AccessControl(Protocol):
    async def check(self, authorization: str) -> Tenant:
        """Check the key or token of a call before the rest of the call is read. Return the tenant.

        This check does not count as a request. Raises the same errors as `enter`, except
        RateLimited.
        """
        ...

    async def enter(self, authorization: str) -> Permit:
        """Raises Unauthenticated, InvalidToken, Unavailable, PermissionDenied or RateLimited.

        `authorization` is the value of the HTTP header or of the gRPC metadata.
        """
        ...

    def join(self, bucket: LedgerBucket, me: str) -> None:
        """Share tenants' limits with all gateways that write this bucket.

        `join` must run before the gateway serves. `me` is the name of this incarnation (this
        process) of the gateway.
        """
        ...

    def share(self, gateways: Collection[str]) -> None:
        """Set the names of the gateways that exist now."""
        ...

    async def run(self) -> None: ...

    async def close(self) -> None: ...


class OpenAccess:
    async def check(self, authorization: str) -> Tenant:
        return ANYONE

    async def enter(self, authorization: str) -> Permit:
        return ANYONES_PERMIT

    def join(self, bucket: LedgerBucket, me: str) -> None: ...

    def share(self, gateways: Collection[str]) -> None: ...

    async def run(self) -> None:
        await asyncio.Event().wait()

    async def close(self) -> None: ...


class KeyedAccess:
    """Admits clients with an API key from the key file, or with a token of the OpenID provider.

    Without `join`, the gateway grants the whole of each limit. After `join`, it grants only the
    parts of limits that it holds.
    """

    def __init__(self, keys_file: Path | None, tokens: ClientTokens | None = None) -> None:
        """Raises BadKeyFile.

        Without `keys_file`, no API key is valid. Without `tokens`, no token is valid.
        """
        self._keys = None if keys_file is None else FollowedKeys(keys_file)
        self._client_tokens = tokens
        self._tenants = Tenants()
        self._ledgers: TenantLedgers | None = None

    def join(self, bucket: LedgerBucket, me: str) -> None:
        self._tenants = Tenants(num_parts)
        self._ledgers = TenantLedgers(bucket, me, self._tenants, self._known)

    async def check(self, authorization: str) -> Tenant:
        return await self._tenant_of(authorization)

    async def enter(self, authorization: str) -> Permit:
        tenant = await self._tenant_of(authorization)
        while (refused := self._tenants.enter(tenant, time.monotonic())) is not None:
            if not await self.has_more(tenant, refused):
                raise self._count(tenant.name, _rate_limited(refused))
        return _KeyedPermit(self, tenant)

    async def _tenant_of(self, authorization: str) -> Tenant:
        token = authorization[len(_BEARER) :].strip()
        if authorization[: len(_BEARER)].lower() != _BEARER or not token:
            raise self._count("", NoApiKey("an API key is needed: Authorization: Bearer <key>"))
        tenant = None if self._keys is None else self._keys.keyring.find(token, time.time())
        if tenant is None and self._client_tokens is not None and not api_keys.is_key(token):
            try:
                tenant = await self._client_tokens.tenant(token, self._in_file)
            except MeshError as exc:
                raise self._count("", exc) from None
        if tenant is None:
            raise self._count("", Unauthenticated("this API key is not valid"))
        if tenant.is_disabled:
            raise self._count(tenant.name, PermissionDenied("this API key's tenant is disabled"))
        return tenant

    @property
    def _in_file(self) -> Mapping[str, Tenant]:
        return {} if self._keys is None else self._keys.keyring.tenants

    def _known(self) -> Mapping[str, Tenant]:
        """The tenants of the key file, and those that tokens have named.

        For a tenant of the key file, the limits in the file apply.
        """
        if self._client_tokens is None:
            return self._in_file
        return ChainMap(dict(self._in_file), dict(self._client_tokens.tenants))

    def share(self, gateways: Collection[str]) -> None:
        if self._ledgers is not None:
            self._ledgers.share(gateways)

    async def run(self) -> None:
        works = []
        if self._keys is not None:
            works.append(self._keys.run(self._forget_tenants))
        if self._client_tokens is not None:
            works.append(self._client_tokens.run())
        if self._ledgers is not None:
            works.append(self._ledgers.run())
        await together(*works)

    async def _forget_tenants(self, before: KeyFile, after: KeyFile) -> None:
        self._tenants.forget_but(frozenset(self._known()))

    async def close(self) -> None:
        if self._ledgers is not None:
            await self._ledgers.close()

    # --- permits ---------------------------------------------------------------------------------

    def charge(self, tenant: Tenant, num_tokens: int) -> Charge | LimitRefused:
        now = time.time()
        day = int(now // _DAY_S)
        left_s = (day + 1) * _DAY_S - now
        return self._tenants.charge(tenant, num_tokens, time.monotonic(), day, left_s)

    async def has_more(self, tenant: Tenant, refused: LimitRefused) -> bool:
        if self._ledgers is None or refused.limit is Limit.QUOTA:
            return False
        if refused.num_lacking:
            return await self._ledgers.more_tokens(tenant, refused.num_lacking)
        return await self._ledgers.more(tenant)

    def settle(self, tenant: Tenant, charge: Charge, num_used: int) -> None:
        self._tenants.settle(tenant, charge, num_used)
        _tokens.add(num_used, {names.ATTR_TENANT: tenant.name})

    def leave(self, tenant: Tenant) -> None:
        self._tenants.leave(tenant)
        if self._ledgers is not None:
            self._ledgers.left(tenant)

    def _count(self, tenant: str, error: MeshError) -> MeshError:
        _refused.add(1, {names.ATTR_TENANT: tenant, names.ATTR_REASON: error.reason})
        return error


class _KeyedPermit:
    __slots__ = ("_access", "_charge", "_has_left", "_refused", "tenant")

    def __init__(self, access: KeyedAccess, tenant: Tenant) -> None:
        self._access = access
        self.tenant = tenant
        self._charge: Charge | None = None
        self._refused: LimitRefused | None = None
        self._has_left = False

    def charge(self, num_tokens: int) -> None:
        """Raises RateLimited."""
        assert self._charge is None
        found = self._access.charge(self.tenant, num_tokens)
        if isinstance(found, LimitRefused):
            self._refused = found
            raise _rate_limited(found)
        self._charge = found

    async def has_more(self) -> bool:
        return self._refused is not None and await self._access.has_more(self.tenant, self._refused)

    def settle(self, num_used: int) -> None:
        charge, self._charge = self._charge, None
        if charge is not None:
            self._access.settle(self.tenant, charge, num_used)

    def leave(self) -> None:
        """End the call, and refund a charge that was not settled. Idempotent."""
        if not self._has_left:
            self._has_left = True
            self.settle(0)
            self._access.leave(self.tenant)


T = TypeVar("T")


async def charged(permit: Permit, work: Callable[[], T]) -> T:
    """Run `work`, which charges the permit, and return its result.

    If the charge is refused, `work` runs again each time that this gateway gets more of the
    tenant's limits. Raises RateLimited.
    """
    while True:
        try:
            return work()
        except RateLimited as exc:
            if not await permit.has_more():
                _refused.add(
                    1, {names.ATTR_TENANT: permit.tenant.name, names.ATTR_REASON: exc.reason}
                )
                raise


def _rate_limited(refused: LimitRefused) -> RateLimited:
    return RateLimited(
        _MESSAGES[refused.limit],
        reason=refused.limit.value,
        retry_after_ms=max(1, math.ceil(refused.retry_after_s * 1000)),
    )


def check_model(tenant: Tenant, model: str) -> None:
    """Raises PermissionDenied."""
    if not tenant.may_use(model):
        raise PermissionDenied("this API key may not use this model", field="model")


def access_control(
    host: str,
    keys_file: Path | None,
    tokens: ClientTokens | None = None,
    *,
    allow_anonymous: bool,
) -> AccessControl:
    """How this gateway admits clients. Raises StartupError with a message of one line.

    `core.access.exposure` decides whether the gateway may run without keys.
    """
    if keys_file is not None or tokens is not None:
        try:
            return KeyedAccess(keys_file, tokens)
        except api_keys.BadKeyFile as exc:
            message = f"{exc}; make one with: pdmesh keys add TENANT --file {keys_file}"
            raise StartupError(message) from exc
    if lacks_keys(host, has_keys=False, is_anonymous_allowed=allow_anonymous):
        raise StartupError(
            f"refusing to listen on {host} without API keys: set PDMESH_GATEWAY_KEYS_FILE "
            "(pdmesh keys add makes one) or PDMESH_OIDC_ISSUER, or "
            "PDMESH_GATEWAY_ALLOW_ANONYMOUS=true on a trusted network"
        )
    return OpenAccess()
