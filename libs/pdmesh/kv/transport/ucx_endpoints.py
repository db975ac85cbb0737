"""Makes a worker's endpoints to its peers, in step with the endpoints that the peers make to it.

UCX pairs the n-th endpoint that a worker makes to a peer's worker with the n-th that the peer makes
to this one. `turn` is that n, from 0. If one end of a pair is closed, the other one may fail, above
all in UCX's next round of keepalive. So both ends of a connection must have the same turn, or the
connection is lost because of another, older one.

The two counts diverge when one side makes an endpoint that the other does not answer: a hello that
was given up or never arrived, or two hellos that cross. Therefore hello and welcome name the turns
of their endpoints, and the side that is behind skips turns.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MAX_SKIPPED = (
    16  # turns per call, about 1 ms each; if the peer is further ahead, more hellos skip on
)
MAX_SPARE = 64
_CLOSE_NS = 1_000_000_000


@dataclass(frozen=True, slots=True, eq=False)
class PairedEndpoint:
    """`raw` is ucxx's endpoint."""

    raw: Any
    turn: int


def close_endpoint(raw: Any) -> None:
    """Close at once, without the peer's consent; posted operations end with it.

    Do not call it within a callback of UCX.
    """
    raw.close_blocking(period=_CLOSE_NS, max_attempts=1)
    raw.remove_close_callback()


class PeerEndpoints:
    """`make` makes UCX's endpoint to an address; `own` is the worker's address."""

    def __init__(self, own: bytes, make: Callable[[bytes], Any]) -> None:
        self._own, self._make = own, make
        # By the digest of an address. UCX never forgets its count of a peer, so neither does this.
        self._num_made: dict[bytes, int] = {}
        self._spare: dict[
            tuple[bytes, int], PairedEndpoint
        ] = {}  # by digest and turn, oldest first

    def num_made(self, address: bytes) -> int:
        return self._num_made.get(_digest(address), 0)

    def next(self, address: bytes) -> PairedEndpoint:
        """An endpoint for a hello to a trusted address; it connects at its first use."""
        if address == self._own and self.num_made(address) % 2:
            # Within one worker, UCX pairs turn 0 with 1, 2 with 3, and so on.
            self._skip_to(address, self.num_made(address) + 1)
        return self._next(address)

    def answering(self, address: bytes, turn: int) -> PairedEndpoint:
        """The endpoint that UCX pairs with the peer's endpoint of that turn.

        If that turn is over, it is the next one: its turn tells the peer to follow.
        """
        if address != self._own:
            spare = self._spare.pop((_digest(address), turn), None)
            if spare is not None:
                return spare
            self._skip_to(address, turn)
        return self._next(address)

    def follow(self, address: bytes, endpoint: PairedEndpoint, turn: int) -> PairedEndpoint:
        """The endpoint that UCX pairs with an answer of that turn to a hello on `endpoint`.

        It is `endpoint` itself if the turns agree, or if that turn is over. If not, `endpoint`
        becomes a spare one: a hello of the peer, which crossed ours, may still come on it.
        """
        is_over = turn < self.num_made(address)
        if turn == endpoint.turn or is_over or address == self._own:
            return endpoint
        found = self.answering(address, turn)
        self._spare[_digest(address), endpoint.turn] = endpoint
        if len(self._spare) > MAX_SPARE:
            close_endpoint(self._spare.pop(next(iter(self._spare))).raw)
        return found

    def close_spare(self) -> None:
        while self._spare:
            close_endpoint(self._spare.popitem()[1].raw)

    def _skip_to(self, address: bytes, turn: int) -> None:
        for _ in range(min(turn - self.num_made(address), MAX_SKIPPED)):
            close_endpoint(self._next(address).raw)

    def _next(self, address: bytes) -> PairedEndpoint:
        digest = _digest(address)
        turn = self._num_made.get(digest, 0)
        self._num_made[digest] = turn + 1  # UCX counts an endpoint that it fails to make, too
        return PairedEndpoint(self._make(address), turn)


def _digest(address: bytes) -> bytes:
    return hashlib.blake2b(address, digest_size=16).digest()
