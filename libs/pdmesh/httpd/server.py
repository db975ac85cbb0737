"""Runs an ASGI application under uvicorn, on a given socket, with bounds on clients' input.

A stop always ends within a bounded time.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any, Final

import uvicorn

from pdmesh.httpd.bounds import Bounds
from pdmesh.httpd.guard import guarded

_SEND_BUFFER_BYTES: Final = 262_144
_BACKLOG: Final = 2048


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture no signals: `pdmesh.service_process` handles them."""
        yield


class HttpServer:
    """Serves from `start` until `stop`, on a listener made by `listen`."""

    # `app` is Any because a plain callable object does not match uvicorn's type for applications.
    def __init__(
        self,
        app: Any,
        listener: socket.socket,
        bounds: Bounds,
        *,
        shutdown_s: float,
        keep_alive_s: int = 75,
    ) -> None:
        self._socket = listener
        self.port: int = listener.getsockname()[1]
        protocol: Any = guarded(bounds)
        config = uvicorn.Config(
            app,
            http=protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=keep_alive_s,
            timeout_graceful_shutdown=max(1, round(shutdown_s)),
            backlog=_BACKLOG,
        )
        self._server = _Server(config)
        self._task: asyncio.Task[None] | None = None

    @property
    def num_connections(self) -> int:
        return len(self._server.server_state.connections)

    def start(self) -> None:
        self._task = asyncio.create_task(self._server.serve([self._socket]), name="http-server")

    async def stop(self) -> None:
        """Close the listener at once. Return when all responses have ended or timed out."""
        # uvicorn checks only every 0.1 s whether it should exit. It would accept and then drop
        # further connections in this time, although another gateway on this port could serve them.
        for server in getattr(self._server, "servers", ()):
            server.close()
        self._server.should_exit = True
        if self._task is not None:
            await self._task
        self._socket.close()


def listen(
    host: str, port: int, *, write_timeout_s: float, reuse_port: bool = False
) -> socket.socket:
    """Make a listening socket that limits the unsent bytes of each connection (F28).

    The kernel buffers at most `_SEND_BUFFER_BYTES` for a slow client, and drops the connection if
    the client accepts nothing for `write_timeout_s`. Without these limits, each connection may hold
    4 MB in the kernel, even after its response has ended. Raises OSError.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
    listener.setsockopt(
        socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, round(write_timeout_s * 1000))
    )
    if reuse_port:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind((host, port))
        listener.listen(_BACKLOG)  # without this, a second process could still take the port
    except OSError:
        listener.close()
        raise
    listener.set_inheritable(False)
    return listener
