"""Decides which windows of requests say nothing about a scenario's ratio (S30).

While a group is set up, loses an instance, is moved or gets another revision, the times of requests
show that and not the ratio. One such moment spoils the whole window.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field


@dataclass(slots=True)
class DisturbedWindows:
    """The disturbed scenarios of the window that is open now."""

    _disturbed: set[str] = field(default_factory=set)

    def see(
        self,
        serving: Mapping[str, Collection[bool]],
        moving: Collection[str],
        upgrading: Collection[str],
    ) -> None:
        """`serving`: by scenario, whether each of its groups is complete and serves.

        `moving`: scenarios with a planned move that waits or is made. `upgrading`: those with a
        group that gets another revision.
        """
        self._disturbed.update(upgrading)
        for scenario, groups in serving.items():
            if not all(groups) or scenario in moving:
                self._disturbed.add(scenario)

    def close(self) -> frozenset[str]:
        """End the window; return the scenarios about which it says nothing."""
        disturbed, self._disturbed = frozenset(self._disturbed), set()
        return disturbed
