"""The network between the hosts of a test.

Every IP packet between two hosts passes through this process.

Each host is a network namespace with one TUN device, whose other end this process reads and writes.
The machine that runs the tests also has one. So TCP, TLS, NATS, Redis, gRPC and UCX run as on real
hosts, and only the cable is simulated. The switch does not use `tc netem`, which many kernels lack.

Usage: python -m tests.support.hosts.switch, with one JSON object for each line of stdin. The first
object is `{"hosts": {"a": ["namespace", "10.0.0.11"]}, "latency_s": 0.002, "loss": 0.001}`; an
empty namespace means the namespace of the switch. The switch answers `ready`. Each later object
cuts the cables that it names and heals all others, for example `{"cut":[["a","b"]]}`. The switch
answers `done`. The switch ends when stdin ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import json
import os
import random
import select
import socket
import struct
import subprocess
import sys
import time
from typing import Final

DEVICE: Final = "eth0"  # the device's name in a host's namespace
MTU: Final = 9000
OUTSIDE: Final = "outside"  # the machine that runs the tests; its packets have no latency or loss
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_MAX_QUEUED: Final = 4096  # the most packets under way; a full switch drops new ones
_IDLE_S: Final = 1.0


class Switch:
    def __init__(self, hosts: dict[str, tuple[str, str]], latency_s: float, loss: float) -> None:
        """`hosts` maps names to (namespace, address). `loss` is the share of lost packets, each
        way.
        """
        self._latency_s, self._loss = latency_s, loss
        self._random = random.Random(24)
        self._fds = {name: _attach(*place) for name, place in hosts.items()}
        self._names = {fd: name for name, fd in self._fds.items()}
        self._by_address = {socket.inet_aton(ip): name for name, (_, ip) in hosts.items()}
        self._cut: set[frozenset[str]] = set()
        # heap of (due time, number, target, packet)
        self._on_way: list[tuple[float, int, int, bytes]] = []
        self._num_packets = 0

    def run(self) -> None:
        """Pass packets until stdin ends."""
        poll = select.epoll()
        for fd in (*self._names, sys.stdin.fileno()):
            poll.register(fd, select.EPOLLIN)
        while True:
            for fd, _ in poll.poll(self._idle_s()):
                if fd in self._names:
                    self._take_all(fd)
                elif not self._obey(os.read(fd, 65_536)):
                    return
            self._deliver()

    def _obey(self, lines: bytes) -> bool:
        for line in lines.splitlines():
            self._cut = {frozenset(pair) for pair in json.loads(line)["cut"]}
            print("done", flush=True)
        return bool(lines)

    def _idle_s(self) -> float:
        due_s = self._on_way[0][0] - time.monotonic() if self._on_way else _IDLE_S
        return min(_IDLE_S, max(0.0, due_s))

    def _take_all(self, fd: int) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                self._take(self._names[fd], os.read(fd, 65_536))

    def _take(self, source: str, packet: bytes) -> None:
        target = self._by_address.get(packet[16:20]) if packet[0] >> 4 == 4 else None
        if target is None or frozenset((source, target)) in self._cut:
            return
        is_outer = OUTSIDE in (source, target)
        is_lost = not is_outer and self._random.random() < self._loss
        if is_lost or len(self._on_way) >= _MAX_QUEUED:
            return
        self._num_packets += 1
        due = time.monotonic() + (0.0 if is_outer else self._latency_s)
        heapq.heappush(self._on_way, (due, self._num_packets, self._fds[target], packet))

    def _deliver(self) -> None:
        while self._on_way and self._on_way[0][0] <= time.monotonic():
            target, packet = heapq.heappop(self._on_way)[2:]
            with contextlib.suppress(OSError):  # the device's queue is full, or the device is down
                os.write(target, packet)


def _attach(namespace: str, address: str) -> int:
    """Create a TUN device in the host's namespace, and return the descriptor of its other end."""
    name = f"pdm{os.getpid() % 100_000}{address.rpartition('.')[2]}"[:15]
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TUN | _IFF_NO_PI))
    inside: tuple[str, ...] = ("ip",)
    if namespace:
        _ip("ip", "link", "set", name, "netns", namespace, "name", DEVICE)
        inside, name = ("ip", "-n", namespace), DEVICE
        _ip(*inside, "link", "set", "lo", "up")
    _ip(*inside, "addr", "add", f"{address}/24", "dev", name)
    _ip(*inside, "link", "set", name, "mtu", str(MTU), "txqueuelen", "5000", "up")
    return fd


def _ip(*command: str) -> None:
    subprocess.run(command, check=True)


def _line(fd: int) -> bytes:
    """Read one line byte by byte, because `run` reads what follows the line."""
    line = b""
    while not line.endswith(b"\n") and (char := os.read(fd, 1)):
        line += char
    return line


def main() -> None:
    first = json.loads(_line(sys.stdin.fileno()))
    hosts = {name: (namespace, ip) for name, (namespace, ip) in first["hosts"].items()}
    switch = Switch(hosts, first["latency_s"], first["loss"])
    print("ready", flush=True)
    switch.run()


if __name__ == "__main__":
    main()
