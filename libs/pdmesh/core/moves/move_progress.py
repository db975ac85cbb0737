"""Decides when a planned move has been made, has failed, or only waits for instances (S21, S28).

A move changes one or two groups. It is made when each of them serves with the counts that it should
have. The group controller works on its own copy of the desired state. Its report about a group
counts only once that copy has the new counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdmesh.core.moves.next_move import MoveEnded, MoveSeen

Counts = tuple[int, int]  # prefills, decodes


@dataclass(frozen=True, slots=True)
class TouchedGroup:
    """A group that the move changes.

    `shall_be`: its counts once the move is made; None if it is to leave. `wanted`: counts that the
    group controller works towards; None if it knows no such group. `is_reported`: the controller
    has looked at the group, and the fields after it are what it said.
    """

    shall_be: Counts | None
    wanted: Counts | None
    is_reported: bool = False
    is_serving: bool = False
    is_failed: bool = False
    detail: str = ""
    lacks: str = ""  # instances that it waits for; empty: none

    @property
    def is_gone(self) -> bool:
        return self.shall_be is None and self.wanted is None and not self.is_reported

    @property
    def is_current(self) -> bool:
        """Whether the controller's report is about the counts that the group should have."""
        return self.is_reported and self.shall_be is not None and self.shall_be == self.wanted


def progress_of(scenario: str, touched: Sequence[TouchedGroup]) -> MoveEnded | MoveSeen:
    """`touched`: first the group that gives or changes, then the one that gets, if there is one."""
    failed = [group for group in touched if group.is_current and group.is_failed]
    if failed:
        return MoveEnded(scenario, is_done=False, detail=failed[0].detail)
    waiting = [g for g in touched if not (g.is_gone or (g.is_current and g.is_serving))]
    if not waiting:
        return MoveEnded(scenario, is_done=True)
    only_lacks = all(group.is_current and group.lacks for group in waiting)
    return MoveSeen(scenario, "; ".join(g.lacks for g in waiting) if only_lacks else "")
