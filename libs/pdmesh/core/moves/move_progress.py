"""Decides whether a planned move is done, has failed, or waits for instances (S21, S28).

A move changes one or two groups. It is done when each of these groups serves with its new counts of
instances, or is gone if the move removes it. The group controller, which changes the groups, works
on its own copy of the desired state, the groups that the mesh should have. So its report about a
group counts only after that copy has the new counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdmesh.core.moves.next_move import MoveEnded, MoveSeen

Counts = tuple[int, int]  # prefills, decodes


@dataclass(frozen=True, slots=True)
class TouchedGroup:
    """A group that the move changes.

    `shall_be` has the group's counts after the move, or None if the group is removed. `wanted` has
    the counts that the group controller works towards, or None if the controller knows no such
    group. `is_reported` means that the controller has reported on the group. The fields after it
    hold that report.
    """

    shall_be: Counts | None
    wanted: Counts | None
    is_reported: bool = False
    is_serving: bool = False
    is_failed: bool = False
    detail: str = ""
    lacks: str = ""  # the instances that the group waits for, as text; empty: none

    @property
    def is_gone(self) -> bool:
        return self.shall_be is None and self.wanted is None and not self.is_reported

    @property
    def is_current(self) -> bool:
        """Whether the controller's report is about the group's new counts."""
        return self.is_reported and self.shall_be is not None and self.shall_be == self.wanted


def progress_of(scenario: str, touched: Sequence[TouchedGroup]) -> MoveEnded | MoveSeen:
    """Whether the move has ended, or is still under way.

    `touched` has the group that gives or changes an instance. If another group gets the instance,
    that group follows.
    """
    failed = [group for group in touched if group.is_current and group.is_failed]
    if failed:
        return MoveEnded(scenario, is_done=False, detail=failed[0].detail)
    waiting = [g for g in touched if not (g.is_gone or (g.is_current and g.is_serving))]
    if not waiting:
        return MoveEnded(scenario, is_done=True)
    only_lacks = all(group.is_current and group.lacks for group in waiting)
    return MoveSeen(scenario, "; ".join(g.lacks for g in waiting) if only_lacks else "")
