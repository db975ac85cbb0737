"""The LoRA adapters that clients may name in place of a model.

The leading master writes the list of adapters to NATS. While NATS is unreachable, the last list
stays valid.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdmesh.core.adapters.adapter import Adapter
from pdmesh.net.nats.board import Board, BoardView
from pdmesh.v1.admin_service_pb2 import RegisteredAdapter


@dataclass(frozen=True, slots=True)
class AdaptedModel:
    """An adapter, and the name of the model that it changes."""

    adapter: Adapter
    model: str


class AdapterNames:
    """The adapters by name. The list is empty until `watch` has read it."""

    def __init__(self) -> None:
        self._known: dict[str, AdaptedModel] = {}
        self._view: BoardView[RegisteredAdapter] | None = None

    def watch(self, board: Board[RegisteredAdapter]) -> None:
        self._view = board.watch(self._on_entry, self._on_gone)

    async def close(self) -> None:
        if self._view is not None:
            await self._view.close()

    def find(self, name: str) -> AdaptedModel | None:
        return self._known.get(name)

    def names(self) -> list[str]:
        return sorted(self._known)

    def _on_entry(self, entry: RegisteredAdapter) -> None:
        adapter = Adapter(entry.name, entry.digest, entry.path)
        self._known[entry.name] = AdaptedModel(adapter, entry.model)

    def _on_gone(self, name: str) -> None:
        self._known.pop(name, None)
