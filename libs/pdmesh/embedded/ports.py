"""Reserves a TCP port for a child process, so that the child can listen on it again after a crash.

The launcher binds the port but does not listen. Because of SO_REUSEADDR, the child can bind the
same port and listen. Several gateways on one port also need SO_REUSEPORT. The system does not give
a bound port to a process that asks for any free port.
"""

from __future__ import annotations

import errno
import socket
from pathlib import Path
from typing import Final, Self

from pdmesh.net.addresses import join

_LISTEN: Final = "0A"  # the state of a listening socket in /proc/net/tcp


class PortTaken(Exception):
    """The port cannot be used. The message is one line, with the process that has it, if known."""


class PortReservation:
    """Reserves `port` on `host` until `close`. For port 0, a free port is chosen."""

    def __init__(self, host: str, port: int, variable: str = "") -> None:
        self.host = host
        if port:
            _refuse_if_taken(host, port, variable)
        self._socket = socket.socket(_family(host), socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._socket.bind((host, port))
        self.port: int = self._socket.getsockname()[1]

    @property
    def address(self) -> str:
        return join(self.host, self.port)

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _refuse_if_taken(host: str, port: int, variable: str) -> None:
    """Raise PortTaken if a process listens on the port, or if the port cannot be used at all.

    This binds the port without SO_REUSEPORT. With it, two meshes could share a port by mistake.
    """
    with socket.socket(_family(host), socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as exc:
            remedy = f"; choose another with {variable}" if variable else ""
            if exc.errno == errno.EADDRINUSE:
                holder = listener_of(port) or "another process"
                raise PortTaken(f"port {port} on {host} is taken by {holder}{remedy}") from None
            raise PortTaken(f"cannot use port {port} on {host}: {exc.strerror}{remedy}") from None


def listener_of(port: int) -> str | None:
    """`name (pid N)` of the process that listens on a TCP port, or None if it is not found."""
    inodes = {inode for table in ("tcp", "tcp6") for inode in _listening_inodes(table, port)}
    if not inodes:
        return None
    for process in Path("/proc").glob("[0-9]*"):
        if _holds_socket(process, inodes):
            return f"{_command_of(process)} (pid {process.name})"
    return None


def _listening_inodes(table: str, port: int) -> list[str]:
    try:
        lines = Path("/proc/net", table).read_text().splitlines()[1:]
    except OSError:
        return []
    fields = [line.split() for line in lines]
    return [f[9] for f in fields if f[3] == _LISTEN and f[1].endswith(f":{port:04X}")]


def _holds_socket(process: Path, inodes: set[str]) -> bool:
    wanted = {f"socket:[{inode}]" for inode in inodes}
    try:
        return any(str(fd.readlink()) in wanted for fd in (process / "fd").iterdir())
    except OSError:
        return False  # the process is gone, or belongs to another user


def _command_of(process: Path) -> str:
    try:
        return (process / "comm").read_text().strip()
    except OSError:
        return "a process"
