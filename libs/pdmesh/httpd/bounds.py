"""The bounds of one HTTP listener, and its current connections."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

# A chunked body may have one byte of framing for this many bytes of content. So chunks of 64 bytes
# are allowed, but a long body in chunks of one byte is not.
_BODY_BYTES_A_FRAMING_BYTE: Final = 8

# An address with more than this share of its limit gives up its connections first.
_CROWDED_SHARE: Final = 0.25

CutOff = Callable[[], None]  # closes the connection


@dataclass(slots=True)
class Bounds:
    max_header_bytes: int
    receive_timeout_s: float
    max_connections: int
    max_connections_per_ip: int
    # If true, old connections are dropped to make room for a new one. If the address of the new one
    # is at its own limit, only connections of this address are dropped. Otherwise, those of the
    # address with the most connections are, if these are many. Connections without a request go
    # first, and older ones before newer ones.
    makes_room: bool = False
    num_by_ip: Counter[str] = field(default_factory=Counter)
    num_open: int = 0
    num_refused: int = 0
    # The addresses of the connections without a request to answer, and of those with one. The first
    # entry of each has been there for the longest time.
    waiting: dict[CutOff, str] = field(default_factory=dict)
    answering: dict[CutOff, str] = field(default_factory=dict)

    def enter(self, ip: str) -> bool:
        if not self._has_room(ip):
            self.num_refused += 1
            if not self._make_room(ip):
                return False
        self.num_open += 1
        self.num_by_ip[ip] += 1
        return True

    def waits(self, ip: str, cut_off: CutOff) -> None:
        self.answering.pop(cut_off, None)
        self.waiting[cut_off] = ip

    def answers(self, ip: str, cut_off: CutOff) -> None:
        self.waiting.pop(cut_off, None)
        self.answering[cut_off] = ip

    def leave(self, ip: str, cut_off: CutOff) -> None:
        self.waiting.pop(cut_off, None)
        self.answering.pop(cut_off, None)
        self.num_open -= 1
        self.num_by_ip[ip] -= 1
        if not self.num_by_ip[ip]:
            del self.num_by_ip[ip]

    def max_framing_bytes(self, num_body_bytes: int) -> int:
        """The most bytes that a request may have outside its body (head, trailers, framing)."""
        return self.max_header_bytes + num_body_bytes // _BODY_BYTES_A_FRAMING_BYTE

    def _has_room(self, ip: str) -> bool:
        return (
            self.num_open < self.max_connections
            and self.num_by_ip[ip] < self.max_connections_per_ip
        )

    def _make_room(self, ip: str) -> bool:
        """Drop connections until there is room for one of `ip`. False if there is none."""
        if not self.makes_room:
            return False
        crowded = self._crowded(ip)
        for cut_off, address in [*self.waiting.items(), *self.answering.items()]:
            if crowded in {"", address}:
                cut_off()
                if self._has_room(ip):
                    return True
        return False

    def _crowded(self, ip: str) -> str:
        """The address that must give up connections for one of `ip`. Empty: any address may."""
        if self.num_by_ip[ip] >= self.max_connections_per_ip:
            return ip
        most = max(self.num_by_ip, key=self.num_by_ip.__getitem__)
        is_crowded = self.num_by_ip[most] > self.max_connections_per_ip * _CROWDED_SHARE
        return most if is_crowded else ""
