"""The addresses on which a mesh's processes listen, read from the kernel as `ss -ltnup` does."""

from __future__ import annotations

import contextlib
import ipaddress
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_TCP_LISTEN = "0A"
_UDP_ANY_PEER = "07"  # an unconnected socket accepts packets from any peer


@dataclass(frozen=True, order=True)
class Listener:
    pid: int
    protocol: str  # tcp or udp
    host: str
    port: int


def listeners(root_pid: int) -> list[Listener]:
    """The listeners of a process and of all its descendants."""
    by_inode = dict(_sockets())
    pids = (root_pid, *_descendants(root_pid))
    found = {
        Listener(pid, *by_inode[inode])
        for pid in pids
        for inode in _inodes_of(pid)
        if inode in by_inode
    }
    return sorted(found)


def _sockets() -> Iterator[tuple[str, tuple[str, str, int]]]:
    for table in ("tcp", "tcp6", "udp", "udp6"):
        lines = Path("/proc/net", table).read_text().splitlines()[1:]
        awaited = _TCP_LISTEN if table.startswith("tcp") else _UDP_ANY_PEER
        for fields in map(str.split, lines):
            if fields[3] == awaited:
                address, _, port = fields[1].partition(":")
                yield fields[9], (table[:3], _host(address), int(port, 16))


def _host(words: str) -> str:
    """The kernel prints each 32-bit word in the machine's byte order."""
    raw = b"".join(bytes.fromhex(words[i : i + 8])[::-1] for i in range(0, len(words), 8))
    address = ipaddress.ip_address(raw)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


def _inodes_of(pid: int) -> Iterator[str]:
    with contextlib.suppress(OSError):  # the process is gone, or belongs to another user
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                link = os.readlink(f"/proc/{pid}/fd/{name}")
                if link.startswith("socket:["):
                    yield link[len("socket:[") : -1]


def _descendants(root_pid: int) -> list[int]:
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parents[int(entry.name)] = int(
                (entry / "stat").read_text().rsplit(")", 1)[1].split()[1]
            )
    found, new = [], [root_pid]
    while new:
        new = [pid for pid, parent in parents.items() if parent in new]
        found += new
    return found
