"""The address that the engines of a data-parallel domain connect to if this instance is its rank 0
(S121).

The master chooses the ranks of a domain among blank instances, and tells all of them the address of
rank 0. So a blank instance reserves a port, and gives it up just before its engine binds it.
"""

from __future__ import annotations

import socket


class MeetingPoint:
    """A port on `host`, announced as `reachable_host`. Port 0 reserves a free one.

    A port that the settings name is not reserved: the operator keeps it free.
    """

    def __init__(self, host: str, reachable_host: str, port: int) -> None:
        self._socket: socket.socket | None = None
        if port == 0:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._socket = socket.socket(family, socket.SOCK_STREAM)
            self._socket.bind((host, 0))
            port = self._socket.getsockname()[1]
        name = f"[{reachable_host}]" if ":" in reachable_host else reachable_host
        self.address = f"{name}:{port}"

    def give_up(self) -> None:
        """From now on another process may bind the port. Idempotent."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
