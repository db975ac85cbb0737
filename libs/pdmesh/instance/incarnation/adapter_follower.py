"""Tells an engine which LoRA adapters are registered, so that the engine unloads all others.

The leading master writes the list of registered adapters. The list loads nothing: an engine loads
an adapter when a request needs it. The engine is told nothing before the whole list has been read,
and nothing while NATS is unreachable. An adapter's digest is a hash of its files.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from pdmesh.net.nats.board import Board, BoardView
from pdmesh.v1.admin_service_pb2 import RegisteredAdapter


class AdapterFollower:
    """Calls `keep` with the digests of all registered adapters after each change of the list."""

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
