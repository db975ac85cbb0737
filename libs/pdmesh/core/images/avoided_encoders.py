"""Decides from which encoders a prefill fetches no embeddings for a while (S130, F34).

An encoder instance makes the embeddings of images, and a prefill fetches them. The network path
between the two may be cut while both are well. Then each prompt with images would wait for its
fetch until the prefill encodes the images itself. Only another fetch can show that the path works
again. So after a while, one prompt tries the path.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

from pdmesh.core.kv.transfer.ticket import PullFailure, Refusal
from pdmesh.core.model import PeerId

LIMIT: Final = 3  # after this many failures in a row, an encoder is avoided
AVOIDED_S: Final = 30.0
MAX_SOURCES: Final = 256

# These failures do not count: one end of the path is overloaded or about to stop, and the path may
# be well.
_SAYS_NOTHING: Final = frozenset(
    {PullFailure.BUSY, PullFailure.CLOSING, f"KV_REFUSED_{Refusal.TOO_MANY_PULLS.name}"}
)


@dataclass(slots=True)
class _Failures:
    num: int = 0  # failures in a row
    avoided_until: float = 0.0  # set once `num` has reached LIMIT


@dataclass(slots=True)
class AvoidedEncoders:
    """One prefill's failed fetches, by encoder and incarnation.

    At most MAX_SOURCES encoders are remembered. If there are more, the one that failed longest ago
    is forgotten.
    """

    _failures: OrderedDict[PeerId, _Failures] = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        return len(self._failures)

    def may_fetch(self, source: PeerId, now: float) -> bool:
        """Whether a prompt may fetch from the encoder now.

        After AVOIDED_S, one prompt may try an avoided encoder, and the others still may not. If the
        outcome of this fetch is not reported, another prompt may try after AVOIDED_S.
        """
        found = self._failures.get(source)
        if found is None or found.num < LIMIT:
            return True
        if now < found.avoided_until:
            return False
        found.avoided_until = now + AVOIDED_S
        return True

    def avoided(self, now: float) -> list[PeerId]:
        """The encoders from which no prompt may fetch now."""
        return [
            source
            for source, found in self._failures.items()
            if found.num >= LIMIT and now < found.avoided_until
        ]

    def fetched(self, source: PeerId) -> None:
        """The encoder answered. This is a success even if some embeddings were missing."""
        self._failures.pop(source, None)

    def failed(self, source: PeerId, reason: str, now: float) -> bool:
        """A fetch failed. Return True if this failure reaches the limit.

        `reason` is the reason of a `KvTransferFailed`.
        """
        if reason in _SAYS_NOTHING:
            return False
        found = self._failures.setdefault(source, _Failures())
        self._failures.move_to_end(source)
        if len(self._failures) > MAX_SOURCES:
            self._failures.popitem(last=False)
        found.num += 1
        if found.num >= LIMIT:
            found.avoided_until = now + AVOIDED_S
        return found.num == LIMIT
