"""Decides in which region a request is computed: its gateway's, as long as there is room (S58)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar


class InRegion(Protocol):
    """Instances that can serve the request together.

    `region`: where their KV stays; empty: it spans regions, or names none. `has_room`: an instance
    of each role has a free slot.
    """

    @property
    def region(self) -> str: ...

    @property
    def has_room(self) -> bool: ...


C = TypeVar("C", bound=InRegion)


def nearest(cells: Sequence[C], region: str) -> list[C]:
    """The cells of the gateway's `region`, unless they are full and others are not."""
    if not region or len(cells) < 2:
        return list(cells)
    near = [cell for cell in cells if cell.region in (region, "")]
    if not near or len(near) == len(cells) or any(cell.has_room for cell in near):
        return near or list(cells)
    return [cell for cell in cells if cell.has_room] or near
