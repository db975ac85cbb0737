"""Follows the list of pinned prefixes, for processes that keep KV blocks or index them.

An operator pins a prefix (the beginning of a prompt) so that its KV is kept. The leading master
writes the list of pins to NATS. A pin contains block names and no text. It applies to one scenario
(a kind of requests with its own instances) or to all. While NATS is unreachable, the list may have
pins that have ended, and lack new ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from pdmesh.core.kv.prefix.pins import PinnedPrefix
from pdmesh.net.nats.board import Board, BoardView
from pdmesh.v1.admin_service_pb2 import Pin


def all_names(pins: Iterable[Pin]) -> frozenset[bytes]:
    """The names of all pinned blocks, whatever their fingerprint."""
    return frozenset(name for pin in pins for blocks in pin.blocks for name in blocks.names)


def prefixes_for(pins: Iterable[Pin], fingerprint: str, scenario: str) -> list[PinnedPrefix]:
    """The prefixes that an instance of this fingerprint and scenario keeps, oldest pin first.

    If there is not enough room for all, the oldest pins win.
    """
    mine = [pin for pin in pins if pin.scenario in ("", scenario)]
    return [
        PinnedPrefix(tuple(blocks.names), blocks.owner, pin.until.ToMicroseconds() / 1e6)
        for pin in sorted(mine, key=lambda pin: (pin.since.ToMicroseconds(), pin.pin_id))
        for blocks in pin.blocks
        if blocks.model_fingerprint == fingerprint
    ]


class PinFollower:
    """Calls `on_change` with all pins whenever a pin is added or removed, until `close`."""

    def __init__(self, board: Board[Pin], on_change: Callable[[Sequence[Pin]], None]) -> None:
        self._on_change = on_change
        self._view: BoardView[Pin] = board.watch(lambda _: self._tell(), lambda _: self._tell())

    def _tell(self) -> None:
        self._on_change(list(self._view.known.values()))

    async def close(self) -> None:
        await self._view.close()
