"""Decides when a gateway is ready: after one of its own requests has passed prefill, KV transfer
and decode.

The registry shows that instances exist. It does not show that this gateway can reach them, or that
KV can move between them. So the gateway probes paths with small requests until one passes. After
that it stays ready, even if a fault occurs later: requests migrate to other instances, and a busy
mesh must not make its gateways unready. Many refusals by full instances also prove that the mesh
works.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

# The ids of a prefill and a decode. The second is empty if one instance does both phases.
Path = tuple[str, str]
# After this many refused probes, on paths that have not failed since, the mesh counts as working
# but busy.
MAX_REFUSALS: Final = 20


@dataclass(slots=True)
class GatewayReadiness:
    """`next` chooses the path to probe. `passed`, `refused` and `failed` take the result."""

    is_ready: bool = False
    num_tries: int = 0
    _refusals: Counter[Path] = field(default_factory=Counter)  # since the path last failed

    @property
    def num_refusals(self) -> int:
        return self._refusals.total()

    def next(self, paths: Sequence[Path]) -> Path:
        """The path to probe next.

        `paths` has all paths that a request may take now, as `probed_paths` returns them. It is not
        empty.
        """
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

    Neighbours in the list have as few instances in common as possible. So successive probes try
    different instances. `prefills` and `decodes` map ids to a value. A prefill may hand KV to a
    decode with the same value. If there is no such pair and no fusion instance, each prefill and
    each decode does both phases.
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
