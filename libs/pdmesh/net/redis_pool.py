"""Pools of connections to Redis: over TLS if the address begins with `rediss://`.

Each new connection shows the latest certificate of this process.
"""

from __future__ import annotations

from typing import Any

from pdmesh.net.tls.own import own_certificates


# Any: redis-py's pools are generic, and the gateway imports redis only if it uses it.
def pool_of(pool_type: Any, url: str, **options: Any) -> Any:
    """A pool of this type, made by its `from_url`. Raises ValueError."""
    pool = pool_type.from_url(url, **options)
    own = own_certificates()
    if own is None or not url.startswith("rediss://"):
        return pool
    from redis.asyncio import SSLConnection

    from pdmesh.net.tls.folder import AUTHORITIES, CERTIFICATE, KEY

    class LatestCertificate(SSLConnection):
        async def connect(self) -> None:
            self.ssl_context.context = None  # redis-py would keep the first one
            await super().connect()  # type: ignore[no-untyped-call]  # redis-py's

    pool.connection_class = LatestCertificate
    pool.connection_kwargs.update(
        ssl_certfile=str(own.path / CERTIFICATE),
        ssl_keyfile=str(own.path / KEY),
        ssl_ca_certs=str(own.path / AUTHORITIES),
    )
    return pool
