"""Decides which instances the next plan of a request leaves out, and for how long."""

from __future__ import annotations

from collections.abc import Iterable

from pdmesh.core.request.events import LegRejected


class PlanExclusions:
    """Instance ids, in the order in which they were excluded."""

    __slots__ = ("_has_narrowed", "_ids", "_out_of_reach", "_too_small")

    def __init__(self) -> None:
        self._ids: dict[str, None] = {}
        self._out_of_reach: dict[str, None] = {}  # prefills whose KV a decode could not get
        self._too_small: dict[str, None] = {}  # instances that could not take it even when empty
        self._has_narrowed = False  # since the request last waited

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(self._ids)

    def add(self, instance_ids: Iterable[str]) -> None:
        self._ids.update(dict.fromkeys(instance_ids))

    def kv_out_of_reach(self, instance_ids: Iterable[str]) -> None:
        self._out_of_reach.update(dict.fromkeys(instance_ids))

    def rejected(self, instance_id: str, event: LegRejected) -> bool:
        """Note a rejection. Returns whether the present plan must not ask the instance again."""
        if event.is_too_long:
            self._too_small[instance_id] = None
        if event.is_final or event.is_too_long:
            self._ids[instance_id] = None
            return True
        return False

    def narrow(self) -> bool:
        """Drop all exclusions but the lasting ones, at most once before the request waits.

        Call it when no other pair is left. Prefills whose KV no decode can get and instances that
        are too small stay excluded, so that a decode may compute the prompt itself. Returns whether
        anything changed.
        """
        lasting = self._out_of_reach | self._too_small
        if self._has_narrowed or not lasting or self._ids.keys() == lasting.keys():
            return False
        self._ids, self._has_narrowed = lasting, True
        return True

    @property
    def is_size_alone(self) -> bool:
        """Whether every excluded instance is too small: then there is no larger one."""
        is_all = self._ids.keys() == self._too_small.keys() and not self._out_of_reach
        return is_all and bool(self._too_small)

    def wait(self) -> None:
        """Exclude only instances that are too small: the others may be back by then."""
        self._ids = dict(self._too_small)

    def waited(self) -> None:
        self._has_narrowed = False
