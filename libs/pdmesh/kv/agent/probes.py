"""The probe that shows that a connection moves KV and does not merely open (P/D-Serve 3.2, S16).

The receiver sends a nonce. The sender answers with bytes derived from it, over the lane and the
code that KV takes. They also depend on the sender's incarnation and the KV's fingerprint, so that
no other process's answer is accepted.
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

# too long to go inline in a message, so it goes from memory to memory
PROBE_BYTES = 2 * wire.MAX_INLINE


def probe_bytes(nonce: bytes, incarnation: int, fingerprint_hash: int) -> ByteArray:
    """What the sender of this incarnation answers to the nonce."""
    seed = b"%b/%d/%d" % (nonce, incarnation, fingerprint_hash)
    return np.frombuffer(hashlib.shake_128(seed).digest(PROBE_BYTES), np.uint8)


class KvProbe:
    """One question to a peer, and its answer once pulled."""

    def __init__(self, incarnation: int, fingerprint_hash: int, source: str) -> None:
        self._asked = (incarnation, fingerprint_hash)
        self._nonce = secrets.token_bytes(wire.NAME_BYTES)
        self._answer: ByteArray = np.zeros(PROBE_BYTES, np.uint8)
        self.order = PullOrder(
            self._message, (self._answer,), PROBE_BYTES, PROBE_BYTES, lambda: None, source=source
        )

    def check(self) -> None:
        """Raises KvTransferFailed if the bytes are intact but are not the answer."""
        if not np.array_equal(self._answer, probe_bytes(self._nonce, *self._asked)):
            raise KvTransferFailed("the probe's answer was wrong", reason=PullFailure.CORRUPT)

    def _message(self, pull_id: int) -> wire.Question:
        return wire.Probe(pull_id, *self._asked, self._nonce)
