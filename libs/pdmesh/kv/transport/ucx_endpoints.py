"""Makes a UCX worker's endpoints to its peers so that both ends of a connection belong together.

UCX pairs endpoints by count. It pairs the n-th endpoint that worker A makes to worker B with the
n-th endpoint that B makes to A. `turn` is this n, counted from 0. When one endpoint of a pair is
closed, the other may fail, mostly at UCX's next keepalive. Therefore both ends of a connection must
have the same turn. Otherwise the end of an older connection would end this one.

The counts of the two workers diverge when one worker makes an endpoint that the other does not
answer. This happens if a hello is given up or lost, or if two hellos cross. Hello and welcome, the
messages that open a connection, name the turns of their endpoints. So the worker with the lower
count can skip turns.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# The most turns that one call skips. A turn takes about 1 ms. If the peer is further ahead, the
# answers to later hellos skip the rest.
MAX_SKIPPED = 16
MAX_SPARE = 64
_CLOSE_NS = 1_000_000_000


@dataclass(frozen=True, slots=True, eq=False)
class PairedEndpoint:
    """An endpoint and its turn. `raw` is the endpoint of ucxx."""

    raw: Any
    turn: int


def close_endpoint(raw: Any) -> None:
    """Close an endpoint at once, without asking the peer. This ends its posted operations.

    Must not be called within a callback of UCX.
    """
    raw.close_blocking(period=_CLOSE_NS, max_attempts=1)
    raw.remove_close_callback()


class PeerEndpoints:
    """One worker's endpoints. `own` is the worker's address; `make` makes an endpoint to a peer."""

    def __init__(self, own: bytes, make: Callable[[bytes], Any]) -> None:
        self._own, self._make = own, make
        # By digest of the address. UCX never forgets its count for a peer, so no entry is removed.
        self._num_made: dict[bytes, int] = {}
        # By digest and turn, oldest first.
        self._spare: dict[tuple[bytes, int], PairedEndpoint] = {}

    def num_made(self, address: bytes) -> int:
        return self._num_made.get(_digest(address), 0)

    def next(self, address: bytes) -> PairedEndpoint:
        """A new endpoint, for a hello to a trusted address. UCX connects it at its first use."""
        if address == self._own and self.num_made(address) % 2:
            # Within one worker, UCX pairs turn 0 with 1, 2 with 3, and so on.
            self._skip_to(address, self.num_made(address) + 1)
        return self._next(address)

    def answering(self, address: bytes, turn: int) -> PairedEndpoint:
        """The endpoint that UCX pairs with the peer's endpoint of this turn.

        If this worker has used the turn already, the result is its next endpoint. The welcome names
        the turn of that endpoint, and the peer changes to it (`follow`).
        """
        if address != self._own:
            spare = self._spare.pop((_digest(address), turn), None)
            if spare is not None:
                return spare
            self._skip_to(address, turn)
        return self._next(address)

    def follow(self, address: bytes, endpoint: PairedEndpoint, turn: int) -> PairedEndpoint:
        """The endpoint to use after a hello on `endpoint` was answered on this turn.

        If the turns are equal, or if this worker has used the answer's turn already, the result is
        `endpoint`. Otherwise the result is an endpoint of the answer's turn, and `endpoint` is kept
        as a spare. A hello from the peer that crossed ours may still arrive on the spare.
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
        self._num_made[digest] = turn + 1  # UCX also counts an endpoint that it fails to make
        return PairedEndpoint(self._make(address), turn)


def _digest(address: bytes) -> bytes:
    return hashlib.blake2b(address, digest_size=16).digest()
