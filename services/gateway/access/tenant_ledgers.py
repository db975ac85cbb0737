"""Shares tenants' limits among all gateways of a mesh.

A part is a piece of a tenant's limit, which one gateway holds and may grant. The tenant's ledger
says which gateway holds which parts (`core.tenancy.limit_parts`). All gateways write the ledgers
into one bucket in NATS.

A call does not wait if this gateway's parts and tokens suffice for it. Otherwise the gateway takes
free ones or asks the others for some, and the call waits for at most half a second. While NATS is
unreachable, each gateway continues with its parts and with the tokens that it has leased from daily
quotas.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import Callable, Collection, Mapping
from typing import Final, Literal, NamedTuple, Protocol

import msgspec
import structlog

from pdmesh.core.tenancy.limit_parts import Ledger, TenantParts
from pdmesh.core.tenancy.limits import (
    Clock,
    Tenant,
    TenantLimits,
    Tenants,
)
from pdmesh.errors import Unavailable
from pdmesh.net.nats.buckets import TENANTS
from pdmesh.net.nats.bus import NatsBus
from pdmesh.net.nats.kv_bucket import (
    KvBucket,
    KvEntry,
    KvWatch,
    WrongRevision,
)
from pdmesh.net.tasks import end, together

log = structlog.get_logger(__name__)

_DAY_S: Final = 86400
_TICK_S: Final = 1.0
_ASK_S: Final = 0.5  # how long a call waits for parts or tokens
_ASK_AGAIN_S: Final = 0.25  # the pause after an `_ask` that got nothing or did not reach NATS
_ATTEMPTS: Final = 5  # to write a ledger that other gateways write at the same time
_CLOSE_S: Final = 2.0  # how long a stopping process waits for the last writes of all tenants
_MAX_GONE: Final = 1024
_GONE_S: Final = 3.0  # a gateway that has had no record for less than this may be starting
_ledgers: Final = msgspec.json.Decoder(Ledger)
_encode: Final = msgspec.json.encode


class LedgerBucket(Protocol):
    """`KvBucket`, or a substitute in tests."""

    async def get(self, key: str) -> KvEntry | None: ...

    async def put(self, key: str, value: bytes, last: int | None = None) -> int: ...

    def watch(
        self,
        on_entry: Callable[[KvEntry], None],
        on_loaded: Callable[[], None],
        on_reset: Callable[[], None],
    ) -> KvWatch: ...


def clock() -> Clock:
    wall = time.time()
    day = int(wall // _DAY_S)
    return Clock(time.monotonic(), wall, day, (day + 1) * _DAY_S - wall)


class _Ask(NamedTuple):
    """What this gateway asks the other gateways for, and for which tenant."""

    name: str
    what: Literal["parts", "tokens"]


class TenantLedgers:
    """The ledgers as this gateway knows them. `me` is the gateway's id and incarnation.

    `known` returns the tenants of the key file, and the tenants that tokens have named.
    """

    def __init__(
        self,
        bucket: LedgerBucket,
        me: str,
        tenants: Tenants,
        known: Callable[[], Mapping[str, Tenant]],
    ) -> None:
        self._bucket, self._me, self._known = bucket, me, known
        self._parts = TenantParts(me, tenants)
        self._tenants = tenants
        self._names: dict[str, str] = {}  # tenants' names by the bucket's keys
        self._gone_at: dict[str, float] = {}
        self._asking: dict[_Ask, asyncio.Task[None]] = {}
        self._ask_again_at: dict[_Ask, float] = {}
        self._changed: dict[_Ask, asyncio.Event] = {}
        self._dirty: dict[str, None] = {}
        self._has_dirty = asyncio.Event()
        self._watch: KvWatch | None = None
        self._living: Collection[str] = ()

    async def more(self, tenant: Tenant) -> bool:
        """Wait for a further part of the tenant's limits. Return whether this gateway got a part.

        Return False at once if this gateway holds all parts.
        """
        if self._parts.holds_all(tenant):
            return False
        return await self._more(tenant, _Ask(tenant.name, "parts"))

    async def more_tokens(self, tenant: Tenant, num_tokens: int) -> bool:
        """Wait for tokens of today's quota, for a call of `num_tokens`.

        Return whether this gateway got any tokens.
        """
        with self._parts.waiting(tenant, num_tokens):
            has_more = await self._more(tenant, _Ask(tenant.name, "tokens"))
        if not has_more:  # the call stops waiting, so no gateway needs to hand over tokens for it
            self._mark(tenant.name)
        return has_more

    def left(self, tenant: Tenant) -> None:
        """Note that a call has ended. A part that the call used can now be handed over."""
        if self._parts.is_leaving(tenant):
            self._mark(tenant.name)

    def share(self, gateways: Collection[str]) -> None:
        """Set which gateways have records in the registry now."""
        self._living = gateways

    async def run(self) -> None:
        """Follow the bucket, hand over the parts that others need, and report the use of tokens."""
        self._watch = self._bucket.watch(self._on_entry, lambda: None, self._parts.forget)
        tick_at = 0.0
        while True:
            wait_s = max(0.0, tick_at - time.monotonic())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._has_dirty.wait()
            self._has_dirty.clear()
            names, self._dirty = list(self._dirty), {}
            for name in names:
                await self._settle(name)
            if time.monotonic() >= tick_at:
                tick_at = time.monotonic() + _TICK_S
                for name in [n for n, t in self._known().items() if self._has_any(t)]:
                    await self._settle(name, tells_use=True)

    async def close(self) -> None:
        """Return all parts and tokens. All calls must have ended before."""
        if self._watch is not None:
            await self._watch.close()
        await end(list(self._asking.values()))
        names = [name for name, tenant in self._known().items() if self._has_any(tenant)]
        try:
            async with asyncio.timeout(_CLOSE_S):
                await together(
                    *(self._settle(name, tells_use=True, is_leaving=True) for name in names)
                )
        except TimeoutError:
            log.warning("tenants.not_given_back", reason="NATS does not answer")

    # --- the bucket ------------------------------------------------------------------------------

    async def _more(self, tenant: Tenant, ask: _Ask) -> bool:
        num = self._num(ask)
        asking = self._asking.get(ask)
        if asking is None:
            if time.monotonic() < self._ask_again_at.get(ask, 0.0):
                return False
            asking = asyncio.create_task(self._ask(tenant, ask), name="tenant-ask")
            self._asking[ask] = asking
        await asyncio.shield(asking)
        return self._num(ask) > num

    async def _ask(self, tenant: Tenant, ask: _Ask) -> None:
        more = self._parts.more if ask.what == "parts" else self._parts.more_tokens
        num = self._num(ask)
        changed = self._changed[ask] = asyncio.Event()
        try:
            async with asyncio.timeout(_ASK_S):
                while True:
                    changed.clear()
                    self._look_who_lives(tenant)
                    is_written = await self._write(tenant, more(tenant, clock()))
                    if self._num(ask) > num:
                        return
                    if is_written:
                        await changed.wait()
        except TimeoutError:
            self._ask_again_at[ask] = time.monotonic() + _ASK_AGAIN_S
        except Unavailable as exc:
            log.warning("tenants.no_ledger", reason=exc.message)
            self._ask_again_at[ask] = time.monotonic() + _ASK_AGAIN_S
        finally:
            del self._changed[ask], self._asking[ask]

    def _num(self, ask: _Ask) -> int:
        """The number of parts, or of leased tokens, that this gateway holds.

        `ask` decides which.
        """
        if ask.what == "parts":
            return len(self._tenants.held(ask.name))
        _, num_leased, _ = self._tenants.today(ask.name, clock().day)
        return num_leased

    async def _settle(
        self, name: str, *, tells_use: bool = False, is_leaving: bool = False
    ) -> None:
        tenant = self._known().get(name)
        if tenant is None or tenant.limits == TenantLimits():
            return
        try:
            for _ in range(_ATTEMPTS):
                self._look_who_lives(tenant)
                ledger = self._parts.due(
                    tenant, clock(), tells_use=tells_use, is_leaving=is_leaving
                )
                if await self._write(tenant, ledger):
                    return
        except Unavailable as exc:
            log.debug("tenants.no_ledger", reason=exc.message)

    async def _write(self, tenant: Tenant, ledger: Ledger | None) -> bool:
        """Write a ledger. Raises Unavailable.

        If another gateway wrote first, read its ledger and return False.
        """
        if ledger is None:
            return True
        key, last = self._key(tenant.name), self._parts.revision(tenant)
        try:
            revision = await self._bucket.put(key, _encode(ledger), last)
        except WrongRevision:
            found = await self._bucket.get(key)
            if found is None:  # the bucket was created again
                self._parts.forget()
            else:
                self._see(tenant, found)
            return False
        self._parts.wrote(tenant, ledger, revision, clock())
        return True

    def _on_entry(self, entry: KvEntry) -> None:
        tenant = self._known().get(self._name(entry.key))
        if tenant is not None and tenant.limits != TenantLimits():
            self._see(tenant, entry)
            self._mark(tenant.name)
            for ask, changed in self._changed.items():
                if ask.name == tenant.name:
                    changed.set()

    def _see(self, tenant: Tenant, entry: KvEntry) -> None:
        ledger = None
        if entry.value is not None:
            try:
                ledger = _ledgers.decode(entry.value)
            except msgspec.MsgspecError:
                log.warning("tenants.bad_ledger", tenant=tenant.name)
        self._parts.seen(tenant, ledger, entry.revision, clock())

    def _has_any(self, tenant: Tenant) -> bool:
        is_held = self._tenants.held(tenant.name) or self._parts.is_leaving(tenant)
        return bool(is_held) or self._parts.has_lease(tenant, clock())

    def _mark(self, name: str) -> None:
        self._dirty[name] = None
        self._has_dirty.set()

    # --- names -----------------------------------------------------------------------------------

    def _look_who_lives(self, tenant: Tenant) -> None:
        """Find out which gateways of the ledger are alive.

        A gateway without a record may be about to write its record, so it counts as alive for
        `_GONE_S`. Earlier incarnations of this gateway are always gone.
        """
        now, own = time.monotonic(), self._me.partition("/")[0] + "/"
        named = {name for name in self._parts.named(tenant) if not name.startswith(own)}
        for name in named:
            if name in self._living:
                self._gone_at.pop(name, None)
            else:
                self._gone_at.setdefault(name, now)
        late = {name for name, at in self._gone_at.items() if now - at < _GONE_S}
        self._parts.alive = late.union(n for n in self._living if not n.startswith(own))
        while len(self._gone_at) > _MAX_GONE:
            del self._gone_at[next(iter(self._gone_at))]

    def _key(self, name: str) -> str:
        """The bucket's key for a tenant. Names may have characters that keys may not have."""
        key = hashlib.blake2b(name.encode(), digest_size=16).hexdigest()
        self._names[key] = name
        return key

    def _name(self, key: str) -> str:
        if key not in self._names:
            for name in self._known():
                self._key(name)
        return self._names.get(key, "")


def tenant_bucket(bus: NatsBus) -> KvBucket:
    return KvBucket(bus, TENANTS)
