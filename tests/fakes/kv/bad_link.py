"""A network link between two processes that a test can slow down, delay, cut or corrupt.

Each process lives in its own network namespace with one TUN device, whose other end this process
reads and writes. So every IP packet between the two passes through `_relay`. The link does not use
`tc netem`, which many kernels lack. A packet with a flipped bit gets a correct TCP checksum, so
that no kernel detects the error. The link needs root (CAP_NET_ADMIN, CAP_SYS_ADMIN) and
/dev/net/tun. `why_not()` returns what is missing.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import os
import random
import select
import struct
import subprocess
import threading
import time
from pathlib import Path

SENDER_IP, RECEIVER_IP = "10.91.0.1", "10.91.0.2"
DEVICE = "kv0"  # the name of the device inside each namespace
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_MTU = 16_000
_MAX_QUEUED = 512  # the most packets in flight in one direction; a full queue drops new ones
_TCP = 6

# A namespace needs its own /sys, because UCX looks there for devices.
IN_A_NAMESPACE = ("unshare", "-nm", "sh", "-c", 'mount -t sysfs none /sys && exec "$@"', "sh")


def why_not() -> str:
    """Why this machine cannot have the link. Empty if it can."""
    if os.geteuid() != 0:
        return "needs root"
    if not Path("/dev/net/tun").exists():
        return "needs /dev/net/tun"
    probe = subprocess.run([*IN_A_NAMESPACE, "true"], capture_output=True, check=False)
    return "" if probe.returncode == 0 else "needs network and mount namespaces"


class BadLink:
    """The link, which has no faults until a test sets some.

    `num_bytes` counts the bytes from the sender to the receiver, including headers.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        # from this byte on, the link passes nothing in either direction
        self.cut_at: int | None = None
        # from this byte on, the next large packet gets a flipped bit
        self.flip_at: int | None = None
        self.bytes_per_s: float | None = None  # in each direction
        self.latency_s = 0.0  # in each direction, in addition to the time from `bytes_per_s`
        self.loss = 0.0  # the share of lost packets in each direction
        self.num_flipped = 0
        self.num_lost = 0
        self._random = random.Random(24)
        self._free_at: dict[int, float] = {}  # when all earlier packets have left, by target
        # heap of (due time, number, target, packet)
        self._on_way: list[tuple[float, int, int, bytes]] = []
        self._num_packets = 0
        self._fds: dict[str, int] = {}
        self._thread = threading.Thread(target=self._relay, name="bad-link", daemon=True)
        self._is_closed = False

    def attach(self, pid: int, own_ip: str) -> None:
        """Give the process's namespace its end of the link. The second call starts the relay."""
        name = f"kv{os.getpid() % 100000}{'s' if own_ip == SENDER_IP else 'r'}"
        fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TUN | _IFF_NO_PI))
        _run("ip", "link", "set", name, "netns", str(pid), "name", DEVICE)
        inside = ("nsenter", "-t", str(pid), "-n", "ip")
        _run(*inside, "addr", "add", f"{own_ip}/24", "dev", DEVICE)
        _run(*inside, "link", "set", DEVICE, "mtu", str(_MTU), "txqueuelen", "5000", "up")
        _run(*inside, "link", "set", "lo", "up")
        self._fds[own_ip] = fd
        if len(self._fds) == 2:
            self._thread.start()

    def close(self) -> None:
        self._is_closed = True
        if self._thread.is_alive():
            self._thread.join(5)
        for fd in self._fds.values():
            os.close(fd)

    @property
    def is_cut(self) -> bool:
        return self.cut_at is not None and self.num_bytes >= self.cut_at

    def _relay(self) -> None:
        sender, receiver = self._fds[SENDER_IP], self._fds[RECEIVER_IP]
        while not self._is_closed:
            ready, _, _ = select.select([sender, receiver], [], [], self._idle_s())
            try:
                for fd in ready:
                    self._take(fd, receiver if fd == sender else sender)
                self._deliver()
            except OSError:
                return  # the device is gone with its namespace

    def _idle_s(self) -> float:
        """The time until the next packet is due, at most 50 ms."""
        due = self._on_way[0][0] - time.monotonic() if self._on_way else 0.05
        return min(0.05, max(0.0, due))

    def _take(self, source: int, target: int) -> None:
        packet = bytearray(os.read(source, 65_536))
        if source == self._fds[SENDER_IP]:
            self.num_bytes += len(packet)
            self._flip(packet)
        if self.is_cut:
            return
        num_queued = sum(other == target for _, _, other, _ in self._on_way)
        if num_queued >= _MAX_QUEUED or self._random.random() < self.loss:
            self.num_lost += 1
            return
        left_at = max(time.monotonic(), self._free_at.get(target, 0.0))
        if self.bytes_per_s:
            left_at += len(packet) / self.bytes_per_s
        self._free_at[target] = left_at
        self._num_packets += 1
        due = left_at + self.latency_s
        heapq.heappush(self._on_way, (due, self._num_packets, target, bytes(packet)))

    def _deliver(self) -> None:
        while self._on_way and self._on_way[0][0] <= time.monotonic():
            target, packet = heapq.heappop(self._on_way)[2:]
            with contextlib.suppress(BlockingIOError):  # a full device loses packets
                os.write(target, packet)

    def _flip(self, packet: bytearray) -> None:
        """Flip one bit in the middle of a large segment, and correct the checksum."""
        is_due = self.flip_at is not None and self.num_bytes >= self.flip_at
        if not is_due or packet[9] != _TCP or len(packet) < _MTU // 2:
            return
        self.flip_at = None
        self.num_flipped += 1
        header = (packet[0] & 0x0F) * 4
        packet[len(packet) // 2] ^= 0x10
        segment = packet[header:]
        segment[16:18] = b"\0\0"
        pseudo = bytes(packet[12:20]) + struct.pack("!BBH", 0, _TCP, len(segment))
        packet[header + 16 : header + 18] = struct.pack("!H", _checksum(pseudo + bytes(segment)))


def _checksum(data: bytes) -> int:
    data += b"\0" * (len(data) % 2)
    total: int = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def reset(pid: int) -> None:
    """Reset every TCP connection of the process over the link, as a middlebox would."""
    _run("nsenter", "-t", str(pid), "-n", "ss", "-K", "dst", "10.91.0.0/24")


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
