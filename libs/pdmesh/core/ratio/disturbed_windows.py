"""Decides which windows of a scenario's requests are ignored by the ratio controller (S30).

A scenario is a kind of requests with its own groups of instances. The controller adapts the ratio
of prefills to decodes to the times of requests. While a group is set up, loses an instance, is
changed by moves or gets another revision of its model, these times do not depend on the ratio
alone. If that happens at any moment of a window, the window is ignored.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field


@dataclass(slots=True)
class DisturbedWindows:
    """The scenarios that were disturbed since the current window began."""

    _disturbed: set[str] = field(default_factory=set)

    def see(
        self,
        serving: Mapping[str, Collection[bool]],
        moving: Collection[str],
        upgrading: Collection[str],
    ) -> None:
        """Note the scenarios that are disturbed now.

        `serving` says by scenario, for each of the scenario's groups, whether the group is complete
        and serves. `moving` has the scenarios with a planned move of an instance that waits or is
        being made. `upgrading` has the scenarios with a group that gets another revision.
        """
        self._disturbed.update(upgrading)
        for scenario, groups in serving.items():
            if not all(groups) or scenario in moving:
                self._disturbed.add(scenario)

    def close(self) -> frozenset[str]:
        """End the window. Returns the scenarios that were disturbed in it."""
        disturbed, self._disturbed = frozenset(self._disturbed), set()
        return disturbed
