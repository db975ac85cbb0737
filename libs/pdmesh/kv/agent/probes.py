"""A probe that shows whether KV moves between two KV agents (P/D-Serve 3.2, S16).

The receiver sends a nonce. The sender derives bytes from the nonce and sends them as it sends KV,
by the same code and over the same UCX transport. The bytes also depend on the sender's incarnation
(one life of an instance) and on the fingerprint of its KV, so the receiver accepts no other
process's answer.
"""

from __future__ import annotations

import hashlib
import secrets

import numpy as np

from pdmesh.core.kv.transfer.ticket import PullFailure
from pdmesh.errors import KvTransferFailed
from pdmesh.kv.agent import wire
from pdmesh.kv.agent.pull_order import PullOrder
from pdmesh.kv.transport.base import ByteArray

# An answer of this size does not fit into a message. It travels from memory to memory, as KV does.
PROBE_BYTES = 2 * wire.MAX_INLINE


def probe_bytes(nonce: bytes, incarnation: int, fingerprint_hash: int) -> ByteArray:
    """The answer to the nonce from a sender of this incarnation and this fingerprint."""
    seed = b"%b/%d/%d" % (nonce, incarnation, fingerprint_hash)
    return np.frombuffer(hashlib.shake_128(seed).digest(PROBE_BYTES), np.uint8)


class KvProbe:
    """One nonce for a peer. Pull `order`, then `check` the answer."""

    def __init__(self, incarnation: int, fingerprint_hash: int, source: str) -> None:
        self._asked = (incarnation, fingerprint_hash)
        self._nonce = secrets.token_bytes(wire.NAME_BYTES)
        self._answer: ByteArray = np.zeros(PROBE_BYTES, np.uint8)
        self.order = PullOrder(
            self._message, (self._answer,), PROBE_BYTES, PROBE_BYTES, lambda: None, source=source
        )

    def check(self) -> None:
        """Raises KvTransferFailed if the pulled bytes are not the answer to the nonce."""
        if not np.array_equal(self._answer, probe_bytes(self._nonce, *self._asked)):
            raise KvTransferFailed("the probe's answer was wrong", reason=PullFailure.CORRUPT)

    def _message(self, pull_id: int) -> wire.Question:
        return wire.Probe(pull_id, *self._asked, self._nonce)
