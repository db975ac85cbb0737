"""Keeps the exclusions of an instance's KV sources and reports them (F23, F24, F34).

A KV source is an instance from which this one pulls KV. `core.kv.transfer.source_exclusions`
decides for how long a source is ejected after corrupt KV, or avoided because it was unreachable or
slow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from pdmesh.core.kv.transfer.source_exclusions import (
    ExcludedSource,
    KvSource,
    KvSources,
    SourceFault,
)

SOURCE_EXCLUDED: Final = "KV_SOURCE_EXCLUDED"
SOURCE_RELEASED: Final = "KV_SOURCE_RELEASED"

OnError = Callable[[str, str, str], None]  # reason, message, request id


class KvSourceReports:
    """Passes each exclusion, and the end of each exclusion, to `on_error`.

    `on_change` is called after an exclusion, because the instance's registry record shows it.
    """

    def __init__(
        self, clock: Callable[[], float], on_error: OnError, on_change: Callable[[], None]
    ) -> None:
        self._sources = KvSources()
        self.on_error = on_error
        self._clock, self._on_change = clock, on_change

    def ejects(self, source: KvSource | None) -> bool:
        return source is not None and self._sources.ejects(source, self._clock())

    def succeeded(
        self, source: KvSource | None, waited_s: float, compute_s: float, request_id: str
    ) -> None:
        """Note a pull that succeeded. See `KvSources.succeeded` for the two times."""
        if source is not None:
            fault = self._sources.succeeded(source, waited_s, compute_s, self._clock())
            self._tell_if_excluded(source, fault, request_id)

    def failed(self, source: KvSource | None, cause: str, request_id: str) -> None:
        """Note a pull that failed. `cause` is the KV agent's reason, or empty if not known."""
        if source is None or not cause:
            return
        fault = self._sources.failed(source, cause, self._clock())
        self._tell_if_excluded(source, fault, request_id)

    def _tell_if_excluded(
        self, source: KvSource, fault: SourceFault | None, request_id: str
    ) -> None:
        if fault is not None:
            self.on_error(SOURCE_EXCLUDED, f"{_name(source)}: {fault}", request_id)
            self._on_change()

    def excluded(self) -> list[ExcludedSource]:
        """The sources that are ejected or avoided now.

        Each call first releases the sources whose exclusion is over. So call this regularly.
        """
        for over in self._sources.release_due(self._clock()):
            self.on_error(SOURCE_RELEASED, f"{_name(over.source)}: {over.fault}", "")
        return self._sources.excluded()

    def num_excluded(self, fault: SourceFault) -> int:
        return sum(h.fault is fault for h in self._sources.excluded())

    def check_invariants(self) -> None:
        self._sources.check_invariants()


def _name(source: KvSource) -> str:
    return f"{source.instance_id}/{source.incarnation:016x}"
