"""Decides which instances the next plan of a request leaves out, and for how long.

A plan names the candidate instances of a request. An instance is left out if it failed for this
request or will not accept it.
"""

from __future__ import annotations

from collections.abc import Iterable

from pdmesh.core.request.events import LegRejected


class PlanExclusions:
    """The instances that are excluded for one request, in the order of their exclusion."""

    __slots__ = ("_has_narrowed", "_ids", "_out_of_reach", "_too_small")

    def __init__(self) -> None:
        self._ids: dict[str, None] = {}
        self._out_of_reach: dict[str, None] = {}  # prefills whose KV a decode could not get
        self._too_small: dict[str, None] = {}  # instances that cannot hold the request when empty
        # Whether `narrow` has changed anything since the request last waited.
        self._has_narrowed = False

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(self._ids)

    def add(self, instance_ids: Iterable[str]) -> None:
        self._ids.update(dict.fromkeys(instance_ids))

    def kv_out_of_reach(self, instance_ids: Iterable[str]) -> None:
        self._out_of_reach.update(dict.fromkeys(instance_ids))

    def rejected(self, instance_id: str, event: LegRejected) -> bool:
        """Note a rejection. Returns whether the current plan must not ask the instance again."""
        if event.is_too_long:
            self._too_small[instance_id] = None
        if event.is_final or event.is_too_long:
            self._ids[instance_id] = None
            return True
        return False

    def narrow(self) -> bool:
        """Keep only the lasting exclusions. Returns whether anything changed.

        The caller uses this method when no instances are left to ask. Prefills whose KV a decode
        could not get stay excluded, and so do instances that are too small. The next plan may then
        name a decode that computes the prompt itself. Before the request waits again, only the
        first call has an effect.
        """
        lasting = self._out_of_reach | self._too_small
        if self._has_narrowed or not lasting or self._ids.keys() == lasting.keys():
            return False
        self._ids, self._has_narrowed = lasting, True
        return True

    @property
    def is_size_alone(self) -> bool:
        """Whether all excluded instances are excluded because they are too small."""
        is_all = self._ids.keys() == self._too_small.keys() and not self._out_of_reach
        return is_all and bool(self._too_small)

    def wait(self) -> None:
        """Exclude only instances that are too small, because the others may work again later."""
        self._ids = dict(self._too_small)

    def waited(self) -> None:
        self._has_narrowed = False
