"""Reserves the port at which the engines of a data-parallel domain meet (S121).

The engines of a domain compute one model together. All of them connect to the engine of rank 0. The
master chooses the ranks among blank instances, that is instances without a role, and sends all of
them the address of rank 0. So every blank instance announces an address with a reserved port. An
instance releases its port just before its engine starts, because the engine of rank 0 binds the
port.
"""

from __future__ import annotations

import socket


class MeetingPoint:
    """A port on `host`, announced with the name `reachable_host`.

    For port 0, a free port is chosen and reserved. Any other port is not reserved: the operator
    keeps it free.
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
        """Release the port, so that another process may bind it. Idempotent."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
