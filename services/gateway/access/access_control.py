"""Decides which clients may call and how much they may use, for both HTTP and gRPC.

It checks API keys and tenants' limits. Each call gets its permit before its body is read, so that a
refusal costs next to nothing. The permit ends with the answer. Without a key file, all clients are
one tenant, which has no limits.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final, Protocol, TypeVar

import structlog

from pdmesh import api_keys
from pdmesh.core.tenancy.limits import (
    ANYONE,
    Charge,
    Limit,
    LimitRefused,
    Tenant,
    Tenants,
)
from pdmesh.core.tenancy.shared_limits import num_parts
from pdmesh.errors import MeshError, Overloaded
from pdmesh.lifecycle import StartupError
from pdmesh.net.loopback import is_loopback
from pdmesh.net.tasks import together
from pdmesh.services.gateway.access.tenant_ledgers import LedgerBucket, TenantLedgers
from pdmesh.telemetry import metrics, names

log = structlog.get_logger(__name__)

_RELOAD_S: Final = 1.0
_DAY_S: Final = 86400
_BEARER: Final = "bearer "

_refused = metrics.counter(
    names.GATEWAY_REFUSED, "Calls refused before their body was read, by tenant and reason"
)
_tokens = metrics.counter(names.TENANT_TOKENS, "Tokens of finished calls, by tenant")

_MESSAGES: Final = {
    Limit.REQUEST_RATE: "too many requests for this API key's tenant",
    Limit.TOKEN_RATE: "too many tokens for this API key's tenant",
    Limit.CONCURRENCY: "too many open requests for this API key's tenant",
    Limit.QUOTA: "this API key's tenant has used up its daily tokens",
}


class Unauthenticated(MeshError):
    grpc_code, http_status, default_reason = "UNAUTHENTICATED", 401, "INVALID_API_KEY"


class NoApiKey(Unauthenticated):
    pass


class PermissionDenied(MeshError):
    grpc_code, http_status, default_reason = "PERMISSION_DENIED", 403, "PERMISSION_DENIED"


class RateLimited(Overloaded):
    """The call exceeds a limit of its tenant, not of the mesh."""


class Permit(Protocol):
    """The right to one call: `charge` before its work, `settle` after it, and always `leave`."""

    @property
    def tenant(self) -> Tenant: ...

    def charge(self, num_tokens: int) -> None: ...

    async def has_more(self) -> bool:
        """Whether this gateway may now grant its tenant more than when `charge` refused."""
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
    def check(self, authorization: str) -> None:
        """Check the key of a call of which nothing has been read yet.

        This check does not count as a request. Raises Unauthenticated or PermissionDenied.
        """
        ...

    async def enter(self, authorization: str) -> Permit:
        """Raises Unauthenticated, PermissionDenied or RateLimited.

        `authorization`: the value of the HTTP header or of the gRPC metadata.
        """
        ...

    def join(self, bucket: LedgerBucket, me: str) -> None:
        """Share the limits with all gateways that write this bucket; call it before the first call.

        `me`: the name of this incarnation of the gateway.
        """
        ...

    def share(self, gateways: Collection[str]) -> None:
        """Tell which gateways exist now, by name."""
        ...

    async def run(self) -> None: ...

    async def close(self) -> None: ...


class OpenAccess:
    def check(self, authorization: str) -> None: ...

    async def enter(self, authorization: str) -> Permit:
        return ANYONES_PERMIT

    def join(self, bucket: LedgerBucket, me: str) -> None: ...

    def share(self, gateways: Collection[str]) -> None: ...

    async def run(self) -> None:
        await asyncio.Event().wait()

    async def close(self) -> None: ...


class KeyedAccess:
    """Reads the key file again when it changes. If it cannot be read, the last keys stay valid.

    A gateway on its own grants the whole of each limit. A gateway that has called `join` grants
    only the parts that it holds.
    """

    def __init__(self, keys_file: Path) -> None:
        """Raises BadKeyFile."""
        self._keys_file = keys_file
        self._stamp = _stamp(keys_file)
        self._keyring = api_keys.Keyring(api_keys.load(keys_file))
        self._tenants = Tenants()
        self._ledgers: TenantLedgers | None = None

    def join(self, bucket: LedgerBucket, me: str) -> None:
        self._tenants = Tenants(num_parts)
        self._ledgers = TenantLedgers(bucket, me, self._tenants, lambda: self._keyring.tenants)

    def check(self, authorization: str) -> None:
        self._tenant_of(authorization)

    async def enter(self, authorization: str) -> Permit:
        tenant = self._tenant_of(authorization)
        while (refused := self._tenants.enter(tenant, time.monotonic())) is not None:
            if not await self.has_more(tenant, refused):
                raise self._count(tenant.name, _rate_limited(refused))
        return _KeyedPermit(self, tenant)

    def _tenant_of(self, authorization: str) -> Tenant:
        token = authorization[len(_BEARER) :].strip()
        if authorization[: len(_BEARER)].lower() != _BEARER or not token:
            raise self._count("", NoApiKey("an API key is needed: Authorization: Bearer <key>"))
        tenant = self._keyring.find(token, time.time())
        if tenant is None:
            raise self._count("", Unauthenticated("this API key is not valid"))
        if tenant.is_disabled:
            raise self._count(tenant.name, PermissionDenied("this API key's tenant is disabled"))
        return tenant

    def share(self, gateways: Collection[str]) -> None:
        if self._ledgers is not None:
            self._ledgers.share(gateways)

    async def run(self) -> None:
        works = [self._follow_keys()]
        if self._ledgers is not None:
            works.append(self._ledgers.run())
        await together(*works)

    async def close(self) -> None:
        if self._ledgers is not None:
            await self._ledgers.close()

    async def _follow_keys(self) -> None:
        while True:
            await asyncio.sleep(_RELOAD_S)
            await self._reload()

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

    # --- files -----------------------------------------------------------------------------------

    async def _reload(self) -> None:
        stamp = _stamp(self._keys_file)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            file = await asyncio.to_thread(api_keys.load, self._keys_file)
        except api_keys.BadKeyFile as exc:
            log.error("keys.unreadable", reason=str(exc))
            return
        self._keyring = keyring = api_keys.Keyring(file)
        self._tenants.forget_but(frozenset(keyring.tenants))
        log.info("keys.loaded", num_keys=len(keyring), num_tenants=len(keyring.tenants))


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
    if tenant.models and model not in tenant.models:
        raise PermissionDenied("this API key may not use this model", field="model")


def access_control(host: str, keys_file: Path | None, *, allow_anonymous: bool) -> AccessControl:
    """An address that other machines can reach needs keys, or `allow_anonymous`.

    Raises StartupError with one line.
    """
    if keys_file is not None:
        try:
            return KeyedAccess(keys_file)
        except api_keys.BadKeyFile as exc:
            message = f"{exc}; make one with: pdmesh keys add TENANT --file {keys_file}"
            raise StartupError(message) from exc
    if not allow_anonymous and not is_loopback(host):
        raise StartupError(
            f"refusing to listen on {host} without API keys: set PDMESH_GATEWAY_KEYS_FILE "
            "(pdmesh keys add makes one), or PDMESH_GATEWAY_ALLOW_ANONYMOUS=true on a trusted "
            "network"
        )
    return OpenAccess()


def _stamp(path: Path) -> tuple[int, int, int]:
    try:
        found = path.stat()
    except OSError:
        return (0, 0, 0)
    return (found.st_mtime_ns, found.st_size, found.st_ino)
