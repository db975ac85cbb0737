"""Follows pinned prefixes for processes that keep blocks or an index of them.

A pinned prefix has only block names. The leading master writes the list. While NATS is away the
list may be old, which only costs room.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from pdmesh.core.kv.prefix.pins import PinnedPrefix
from pdmesh.net.nats.board import Board, BoardView
from pdmesh.v1.admin_service_pb2 import Pin


def all_names(pins: Iterable[Pin]) -> frozenset[bytes]:
    """Names of blocks under any fingerprint."""
    return frozenset(name for pin in pins for blocks in pin.blocks for name in blocks.names)


def prefixes_for(pins: Iterable[Pin], fingerprint: str, scenario: str) -> list[PinnedPrefix]:
    """What an instance keeps, oldest pin first: if room is short, later pins wait."""
    mine = [pin for pin in pins if pin.scenario in ("", scenario)]
    return [
        PinnedPrefix(tuple(blocks.names), blocks.owner, pin.until.ToMicroseconds() / 1e6)
        for pin in sorted(mine, key=lambda pin: (pin.since.ToMicroseconds(), pin.pin_id))
        for blocks in pin.blocks
        if blocks.model_fingerprint == fingerprint
    ]


class PinFollower:
    """Passes all pins on whenever one comes or goes, until closed."""

    def __init__(self, board: Board[Pin], on_change: Callable[[Sequence[Pin]], None]) -> None:
        self._on_change = on_change
        self._view: BoardView[Pin] = board.watch(lambda _: self._tell(), lambda _: self._tell())

    def _tell(self) -> None:
        self._on_change(list(self._view.known.values()))

    async def close(self) -> None:
        await self._view.close()
