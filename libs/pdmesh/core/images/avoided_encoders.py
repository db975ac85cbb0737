"""The encoders from which a prefill fetches no embeddings for a while (S130, F34).

A path may be cut between an encoder and a prefill while both are well. Then each prompt with images
would wait for its fetch, until the prefill encodes them itself. Only another fetch shows that the
path is back, so after a while one prompt tries it.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

from pdmesh.core.kv.transfer.ticket import PullFailure, Refusal
from pdmesh.core.model import PeerId

LIMIT: Final = 3  # failures in a row
AVOIDED_S: Final = 30.0
MAX_SOURCES: Final = 256

# These say nothing about the path: one of its ends is overloaded, or about to stop.
_SAYS_NOTHING: Final = frozenset(
    {PullFailure.BUSY, PullFailure.CLOSING, f"KV_REFUSED_{Refusal.TOO_MANY_PULLS.name}"}
)


@dataclass(slots=True)
class _Failures:
    num: int = 0  # in a row
    avoided_until: float = 0.0  # set by each failure from the limit on


@dataclass(slots=True)
class AvoidedEncoders:
    """One prefill's record of the encoders from which it failed to fetch, by incarnation.

    At most MAX_SOURCES are remembered: the one that failed longest ago is forgotten first.
    """

    _failures: OrderedDict[PeerId, _Failures] = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        return len(self._failures)

    def may_fetch(self, source: PeerId, now: float) -> bool:
        """Whether a prompt fetches from it now.

        After AVOIDED_S one prompt tries the source again, and the others still may not. If that
        fetch has no outcome, another prompt tries after AVOIDED_S.
        """
        found = self._failures.get(source)
        if found is None or found.num < LIMIT:
            return True
        if now < found.avoided_until:
            return False
        found.avoided_until = now + AVOIDED_S
        return True

    def avoided(self, now: float) -> list[PeerId]:
        """The sources from which no prompt may fetch now."""
        return [
            source
            for source, found in self._failures.items()
            if found.num >= LIMIT and now < found.avoided_until
        ]

    def fetched(self, source: PeerId) -> None:
        """The source answered, though it may have lacked what was asked for."""
        self._failures.pop(source, None)

    def failed(self, source: PeerId, reason: str, now: float) -> bool:
        """`reason`: of a `KvTransferFailed`. True if this failure reaches the limit."""
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
