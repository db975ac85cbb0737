"""Decides when a gateway is ready: once a request of its own has passed prefill, KV transfer and
decode.

The registry shows that instances exist. It does not show that this gateway can reach them, or that
KV can move between them. One such proof is enough: later faults do not make the gateway unready,
because requests migrate, and because a busy mesh must not make its gateways unready. Many refusals
by full instances are a proof, too: such a mesh works.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

Path = tuple[str, str]  # the ids of a prefill and a decode; the second is empty if one does both
# After this many refused probes, on paths that have not failed since, the mesh is busy: it works.
MAX_REFUSALS: Final = 20


@dataclass(slots=True)
class GatewayReadiness:
    """`next` says which path to probe; `passed`, `refused` or `failed` takes the result."""

    is_ready: bool = False
    num_tries: int = 0
    _refusals: Counter[Path] = field(default_factory=Counter)  # of each path, since it last failed

    @property
    def num_refusals(self) -> int:
        return self._refusals.total()

    def next(self, paths: Sequence[Path]) -> Path:
        """`paths`: all that a request may take now, at least one, as from `probed_paths`."""
        path = paths[self.num_tries % len(paths)]
        self.num_tries += 1
        return path

    def passed(self) -> None:
        self.is_ready = True

    def refused(self, path: Path) -> None:
        """An instance of the path is full."""
        self._refusals[path] += 1
        self.is_ready = self.is_ready or self.num_refusals >= MAX_REFUSALS

    def failed(self, path: Path) -> None:
        del self._refusals[path]


def probed_paths(
    prefills: Mapping[str, str], decodes: Mapping[str, str], fusions: Sequence[str]
) -> list[Path]:
    """All paths of a request: a prefill and a decode, or one instance for both phases.

    Neighbours in the list have as few instances in common as possible. `prefills` and `decodes` map
    ids to a value that is equal for a pair that may hand KV over. Without any such pair or a fusion
    instance, each prefill and decode does both phases.
    """
    partners = [
        (p, [d for d, pair in decodes.items() if pair == own]) for p, own in prefills.items()
    ]
    pairs = [
        (prefill, able[(number + turn) % len(able)])
        for turn in range(len(decodes))
        for number, (prefill, able) in enumerate(partners)
        if turn < len(able)
    ]
    alone = fusions or ([] if pairs else [*prefills, *decodes])
    return [*pairs, *((instance_id, "") for instance_id in alone)]
