"""Pools of connections to Redis: over TLS if the address begins with `rediss`, and through
sentinels if the address names them (`core.server_urls`).

Each new connection shows the latest certificate of this process. Through sentinels, it goes to the
server that is the primary at that time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from pdmesh.core.server_urls import SentinelUrl, is_sentinel_url
from pdmesh.net.addresses import join
from pdmesh.net.tasks import end, watched
from pdmesh.net.tls.own_certificate import own_certificates

if TYPE_CHECKING:
    from pdmesh.net.tls.certificate_renewal import CertificateFolder

Address = tuple[str, int]

# redis-py tells the server its name and version by a command that the roles may not use.
_QUIET: Final = {"driver_info": None}


# Any: redis-py's pools are generic, and the gateway imports redis only if it uses it.
def pool_of(pool_type: Any, url: str, **options: Any) -> Any:
    """A pool of this type. Raises ValueError."""
    options = {**_QUIET, **options}
    if is_sentinel_url(url):
        return _pool_behind_sentinels(pool_type, SentinelUrl.parse(url), options)
    pool = pool_type.from_url(url, **options)
    own = own_certificates()
    if own is None or not url.startswith("rediss://"):
        return pool
    from redis.asyncio import SSLConnection

    pool.connection_class = _with_latest_certificate(SSLConnection)
    pool.connection_kwargs.update(_files(own))
    return pool


def _pool_behind_sentinels(pool_type: Any, url: SentinelUrl, options: dict[str, Any]) -> Any:
    from redis.asyncio.sentinel import SentinelManagedConnection, SentinelManagedSSLConnection

    shared: dict[str, Any] = {
        **_QUIET,
        "username": url.username or None,
        "password": url.password or None,
    }
    connection: Any = SentinelManagedConnection
    if url.is_encrypted:
        connection = SentinelManagedSSLConnection
        if (own := own_certificates()) is not None:
            connection = _with_latest_certificate(connection)
            shared |= _files(own)
    timeouts = {name: value for name, value in options.items() if name.startswith("socket_")}
    pool = pool_type(
        connection_class=connection, db=url.database, host="", port=0, **(options | shared)
    )
    # redis-py's own pool for sentinels never waits for a free connection, as a blocking one does.
    pool.connection_kwargs["connection_pool"] = Primary(url, {**shared, **timeouts}, pool)
    return pool


def primary_of(pool: Any) -> str:
    """The primary that sentinels last named to a pool of `pool_of`; empty: none has named one."""
    found = pool.connection_kwargs.get("connection_pool")
    return "" if found is None or found.address is None else join(*found.address)


class Primary:
    """What redis-py's connections behind sentinels ask of their pool."""

    is_master = True
    check_connection = False

    def __init__(self, url: SentinelUrl, options: Mapping[str, Any], pool: Any) -> None:
        self._url, self._options, self._pool = url, options, pool
        self.address: Address | None = None  # as last asked
        self._closing: set[asyncio.Task[None]] = set()

    async def get_master_address(self) -> Address:
        """Raises redis-py's ConnectionError if no sentinel knows the primary."""
        address = await self._first_answer()
        if self.address not in (None, address):  # idle connections lead to the former primary
            await self._pool.disconnect(inuse_connections=False)
        self.address = address
        return address

    async def _first_answer(self) -> Address:
        """Ask all sentinels at once: one whose host is gone would not answer in time."""
        from redis.exceptions import ConnectionError as NotReached

        asking = {asyncio.create_task(self._ask(*each)) for each in self._url.sentinels}
        waiting = asking
        try:
            while waiting:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    if (address := task.result()) is not None:
                        return address
        finally:
            await end(asking)
        raise NotReached(f"no sentinel knows the primary of {self._url.primary!r}")

    async def _ask(self, host: str, port: int) -> Address | None:
        """None: the sentinel does not answer, or knows no primary that is up."""
        from redis.asyncio import sentinel as library
        from redis.exceptions import RedisError

        untyped: Any = library
        kwargs = {**self._options, "ssl": self._url.is_encrypted}
        sentinel = untyped.Sentinel([(host, port)], sentinel_kwargs=kwargs)
        try:
            found: Address = await sentinel.discover_master(self._url.primary)
        except (RedisError, OSError, TimeoutError):
            return None
        finally:
            self._close(sentinel)
        return found

    def _close(self, sentinel: Any) -> None:
        """Close its connections in a task of its own.

        The question may be cancelled while it closes them, and redis-py would then leave them open.
        """
        task = watched(sentinel.aclose(), "close a sentinel's connections", lambda _: None)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


def _with_latest_certificate(connection: Any) -> Any:
    """A subclass whose connections each read the certificate's files anew."""

    class LatestCertificate(connection):  # type: ignore[misc]  # redis-py's, which is untyped
        async def connect(self) -> None:
            self.ssl_context.context = None  # redis-py would keep the first one
            await super().connect()

    return LatestCertificate


def _files(own: CertificateFolder) -> dict[str, str]:
    from pdmesh.net.tls.certificate_renewal import AUTHORITIES, CERTIFICATE, KEY

    return {
        "ssl_certfile": str(own.path / CERTIFICATE),
        "ssl_keyfile": str(own.path / KEY),
        "ssl_ca_certs": str(own.path / AUTHORITIES),
    }
