"""Tells an engine which adapters are registered, so that it unloads those that are not.

The leading master writes the list. An engine loads what requests ask for, not what is listed. Until
the whole list has been read, and while NATS is away, the engine is told nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from pdmesh.net.nats.board import Board, BoardView
from pdmesh.v1.admin_service_pb2 import RegisteredAdapter


class AdapterFollower:
    """`keep` gets the digests of all registered adapters whenever one comes or goes."""

    def __init__(
        self, board: Board[RegisteredAdapter], keep: Callable[[Collection[str]], None]
    ) -> None:
        self._keep = keep
        self._view: BoardView[RegisteredAdapter] = board.watch(
            lambda _: self._tell(), lambda _: self._tell()
        )

    def _tell(self) -> None:
        if self._view.loaded.is_set():
            self._keep({entry.digest for entry in self._view.known.values()})

    async def close(self) -> None:
        await self._view.close()
