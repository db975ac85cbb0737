"""Makes pools of connections to Redis, by the address of the server (`core.server_urls`).

The connections use TLS if the address begins with `rediss`, and show the latest certificate of this
process. If the address names sentinels, each new connection is made to the server that is the
primary at that time.
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

# Without this, redis-py sends its name and version by a command that the server's ACLs forbid.
_QUIET: Final = {"driver_info": None}


# The types are Any because redis-py's pools are generic, and because a gateway without Redis does
# not import redis.
def pool_of(pool_type: Any, url: str, **options: Any) -> Any:
    """A pool of this type. Raises ValueError for a bad address."""
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
    # redis-py's own pool for sentinels cannot wait for a free connection. This pool can, if
    # `pool_type` is a blocking one.
    pool.connection_kwargs["connection_pool"] = Primary(url, {**shared, **timeouts}, pool)
    return pool


def primary_of(pool: Any) -> str:
    """The address of the primary that sentinels last named to the pool.

    Empty if no sentinel has named one. `pool` is from `pool_of`.
    """
    found = pool.connection_kwargs.get("connection_pool")
    return "" if found is None or found.address is None else join(*found.address)


class Primary:
    """Finds the primary for the connections of a pool.

    redis-py's connections behind sentinels use it in place of redis-py's own pool.
    """

    is_master = True
    check_connection = False

    def __init__(self, url: SentinelUrl, options: Mapping[str, Any], pool: Any) -> None:
        self._url, self._options, self._pool = url, options, pool
        self.address: Address | None = None  # from the last answer
        self._closing: set[asyncio.Task[None]] = set()

    async def get_master_address(self) -> Address:
        """Raises redis-py's ConnectionError if no sentinel knows the primary."""
        address = await self._first_answer()
        if self.address not in (None, address):  # the idle connections are to the former primary
            await self._pool.disconnect(inuse_connections=False)
        self.address = address
        return address

    async def _first_answer(self) -> Address:
        """Ask all sentinels at the same time, because one whose host is gone does not answer."""
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
        """The primary that one sentinel names.

        None if the sentinel does not answer, or knows no primary that is up.
        """
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
        """Close the client's connections in a separate task.

        `_ask` may be cancelled. If it closed the connections itself, redis-py would then leave them
        open.
        """
        task = watched(sentinel.aclose(), "close a sentinel's connections", lambda _: None)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


def _with_latest_certificate(connection: Any) -> Any:
    """A subclass whose connections read the certificate's files each time that they connect."""

    class LatestCertificate(connection):  # type: ignore[misc]  # redis-py's, which is untyped
        async def connect(self) -> None:
            self.ssl_context.context = None  # otherwise redis-py would reuse the first context
            await super().connect()

    return LatestCertificate


def _files(own: CertificateFolder) -> dict[str, str]:
    from pdmesh.net.tls.certificate_renewal import AUTHORITIES, CERTIFICATE, KEY

    return {
        "ssl_certfile": str(own.path / CERTIFICATE),
        "ssl_keyfile": str(own.path / KEY),
        "ssl_ca_certs": str(own.path / AUTHORITIES),
    }
