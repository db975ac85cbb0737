"""Decides when a gateway is ready: once a request of its own has passed prefill, KV transfer and
decode.

The registry shows that instances exist. It does not show that this process can reach them, or that
KV can move between them. One such proof is enough: later faults do not make the gateway unready,
because requests migrate, and because a busy mesh must not make its gateways unready.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

import structlog

from pdmesh.net.grpc.canary_call import Canary, CanaryFailed, CanaryRefused
from pdmesh.v1.common_pb2 import InstanceRecord

log = structlog.get_logger(__name__)

Path = tuple[InstanceRecord, InstanceRecord | None]  # the second is None if the first does both
_LOOK_S: Final = 0.1
_AGAIN_S: Final = 0.5
_TIMEOUT_S: Final = 10.0
# If this many probes are refused, on paths that have not failed since, the mesh is busy: it works.
_MAX_REFUSALS: Final = 20


class PathProof:
    """`paths` returns the paths that a request may take now, the most different ones first."""

    def __init__(self, paths: Callable[[], Sequence[Path]], gateway_id: str) -> None:
        self._paths, self._gateway_id = paths, gateway_id
        self.is_given = False

    async def run(self) -> None:
        """Probe until one path is proved."""
        num_tries = 0
        refusals: Counter[tuple[str, str]] = Counter()  # of each path, since it last failed
        while not self.is_given:
            paths = self._paths()
            if not paths:
                await asyncio.sleep(_LOOK_S)
                continue
            prefill, decode = paths[num_tries % len(paths)]
            num_tries += 1
            way = (prefill.instance_id, decode.instance_id if decode else "")
            try:
                await Canary(prefill, decode, self._gateway_id, _TIMEOUT_S).send()
                self.is_given = True
            except CanaryRefused:
                refusals[way] += 1
                self.is_given = refusals.total() >= _MAX_REFUSALS
                await asyncio.sleep(_LOOK_S)
            except CanaryFailed as exc:
                del refusals[way]
                _complain(*way, exc)
                await asyncio.sleep(_AGAIN_S)
        log.info("path.proven", num_tries=num_tries, num_refusals=refusals.total())


def _complain(prefill_id: str, decode_id: str, why: CanaryFailed) -> None:
    log.warning("path.failed", prefill_id=prefill_id, decode_id=decode_id, reason=str(why))
