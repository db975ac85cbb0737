"""Decides in which region a request is computed (S58).

A region is a place in which instances are near each other. A request is computed in the region of
the gateway that received it, as long as there is room.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar


class InRegion(Protocol):
    """A set of instances that can serve the request together.

    `region` is the region that their KV stays in. It is empty if the KV may cross regions, or if
    the instances name no region. `has_room` means that an instance of each role has a free slot.
    """

    @property
    def region(self) -> str: ...

    @property
    def has_room(self) -> bool: ...


C = TypeVar("C", bound=InRegion)


def nearest(cells: Sequence[C], region: str) -> list[C]:
    """The cells of the gateway's `region`. If all of these are full, the cells with room.

    A cell is a set of instances that can serve a request together. A cell without a region counts
    as one of the gateway's region. If no cell is in that region, all cells are returned.
    """
    if not region or len(cells) < 2:
        return list(cells)
    near = [cell for cell in cells if cell.region in (region, "")]
    if not near or len(near) == len(cells) or any(cell.has_room for cell in near):
        return near or list(cells)
    return [cell for cell in cells if cell.has_room] or near
