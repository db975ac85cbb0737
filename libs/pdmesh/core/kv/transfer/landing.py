"""Decides when the landing of a pull may be used again.

A pull transfers one prompt's KV. Its landing is the range of memory that the pull writes to. The
sender announces each part of the pull. The part's bytes come with the announcement (inline), or
through a receive that is posted after it. A posted receive can write at any time until its bytes
arrive or the connection ends. So the landing of a pull that ended early stays taken until the
connection ends, or until every announced part has arrived and the sender announces no more.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pdmesh.core.kv.transfer.receiver_events import MetaArrived


@dataclass(slots=True)
class Landing:
    """The state of one pull's landing: parts that may still be written, and parts being checked."""

    min_bytes: int
    max_bytes: int
    num_bytes: int = -1  # size of the whole pull; -1 until the first announcement
    num_announced: int = 0  # bytes
    num_parts: int = 0
    posted: set[int] = field(default_factory=set)  # parts for which a write may still land
    checking: set[int] = field(default_factory=set)
    is_refused: bool = False  # the sender announces no more parts
    is_peer_lost: bool = False

    @property
    def is_announced(self) -> bool:
        return self.num_announced == self.num_bytes

    @property
    def is_owed(self) -> bool:
        """Whether bytes are still to come."""
        return not self.is_announced or bool(self.posted)

    @property
    def is_free(self) -> bool:
        """Whether no byte can be written any more and no part is being checked."""
        is_over = self.is_announced or self.is_refused or self.is_peer_lost
        return is_over and not self.posted and not self.checking

    def announce(self, part: MetaArrived) -> int | None:
        """Record an announcement. Returns the number of the part, whose bytes may now be written.

        Returns None if the sender may not announce this part, because the part comes after the end
        or a refusal, leaves a gap, or has wrong sizes. So no byte is written twice or outside the
        range.
        """
        if self.is_refused or self.is_announced or part.offset != self.num_announced:
            return None
        if self.num_bytes >= 0 and part.num_bytes != self.num_bytes:
            return None
        is_right_size = self.min_bytes <= part.num_bytes <= self.max_bytes
        is_some = part.length > 0 or part.num_bytes == 0
        if not (is_right_size and is_some and part.offset + part.length <= part.num_bytes):
            return None
        index = self.num_parts
        self.num_bytes = part.num_bytes
        self.num_announced += part.length
        self.num_parts += 1
        if not part.is_inline:
            self.posted.add(index)
        return index

    def lose_peer(self) -> bool:
        """The connection has ended, so nothing is written any more. True if bytes are missing."""
        is_short = self.is_owed
        self.is_peer_lost = True
        self.posted.clear()
        return is_short
