"""The bytes that a KV agent sends for a ticket, with their checksums.

A ticket is the right to pull one prompt's KV. The sender sends the KV in parts (`pull_parts`). A
part consists of one or more contiguous pieces, and each piece has a checksum.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from pdmesh.core.kv.layout.buffer_layout import KvLayout
from pdmesh.core.kv.transfer.pull_parts import KvPart
from pdmesh.kv.agent.checksums import ChecksumKind, checksum, kind_of
from pdmesh.kv.agent.types import PinnedBlocks
from pdmesh.kv.transport.base import KvBytes

Piece = tuple[KvBytes, bytes]  # bytes and their checksum


@dataclass(slots=True, eq=False)
class StagedRange:
    """A prompt's bytes in the staging arena.

    `parts` divides the bytes for a pull of all heads and blocks. The checksum of such a part is
    computed once its layers are written. A pull of only some heads or blocks has other parts, whose
    checksums are computed when they are sent.
    """

    data: KvBytes
    layout: KvLayout
    parts: tuple[KvPart, ...]  # the parts of a pull of all heads and blocks
    checksums: list[bytes] = field(default_factory=list)
    num_written: int = 0  # layers
    hashing: asyncio.Task[None] | None = None
    has_failed: bool = False  # a checksum could not be computed, so no pull is served

    @property
    def num_to_hash(self) -> int:
        """The number of parts that are written and have no checksum yet."""
        todo = self.parts[len(self.checksums) :]
        return sum(part.end_layer <= self.num_written for part in todo)

    @property
    def num_ready(self) -> int:
        """The number of layers that are written and whose completed parts have checksums."""
        if self.has_failed or not self.num_to_hash:
            return self.num_written
        return self.parts[len(self.checksums)].first_layer

    def completes_part(self, num_layers: int) -> bool:
        """Whether the first `num_layers` layers complete a part of a pull.

        In the last eighth of the layers this is always True: each layer may complete a part of a
        pull of some heads or blocks.
        """
        is_near_end = num_layers * 8 > self.layout.num_layers * 7
        return is_near_end or any(part.end_layer == num_layers for part in self.parts)

    def hash_next(self) -> None:
        self.checksums.append(checksum(self._bytes(self.parts[len(self.checksums)])))

    def pieces(self, part: KvPart) -> list[Piece]:
        if len(part.spans) == 1:
            data, start = self._bytes(part), part.spans[0].offset
            if part is self.parts[0] and self.checksums:
                return [(data, self.checksums[0])]
            for known, digest in zip(self.parts, self.checksums, strict=False):
                if known.spans[0].offset == start and known.length == part.length:
                    return [(data, digest)]
            return [(data, checksum(data))]
        views = [self.data[s.offset : s.offset + s.length] for s in part.spans]
        return [(view, checksum(view)) for view in views]

    @property
    def kind(self) -> ChecksumKind:
        return kind_of(self.data)

    def _bytes(self, part: KvPart) -> KvBytes:
        span = part.spans[0]
        return self.data[span.offset : span.offset + span.length]


@dataclass(slots=True, eq=False)
class LentBlocks:
    """Blocks of a pool, or the answer to a probe, while they are sent to one peer."""

    blocks: PinnedBlocks
    unpin: Callable[[PinnedBlocks], None]
    kind: ChecksumKind = ChecksumKind.XXH3  # pools are in the host's memory

    def pieces(self, part: KvPart) -> list[Piece]:
        size = self.blocks.views[0].size
        indices = range(part.offset // size, (part.offset + part.length) // size)
        views, checksums = self.blocks.views, self.blocks.checksums
        return [(views[i], checksums[i] if checksums else checksum(views[i])) for i in indices]
