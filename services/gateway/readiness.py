"""Sends probes through instances until they have proved that this gateway is ready.

A path is the prefill and the decode that a request goes through. `core.health.gateway_readiness`
decides which path is probed next, and when the gateway is ready: after one passed probe, or after
many probes that full instances refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

import structlog

from pdmesh.core.health.gateway_readiness import GatewayReadiness
from pdmesh.net.grpc.canary_call import Canary, CanaryFailed, CanaryRefused
from pdmesh.v1.common_pb2 import InstanceRecord

log = structlog.get_logger(__name__)

Path = tuple[InstanceRecord, InstanceRecord | None]  # None: the first instance also decodes
_LOOK_S: Final = 0.1
_AGAIN_S: Final = 0.5
_TIMEOUT_S: Final = 10.0


class PathProof:
    """`paths` returns the paths that a request may take now, in the order in which to probe."""

    def __init__(self, paths: Callable[[], Sequence[Path]], gateway_id: str) -> None:
        self._paths, self._gateway_id = paths, gateway_id
        self._core = GatewayReadiness()

    @property
    def is_given(self) -> bool:
        return self._core.is_ready

    async def run(self) -> None:
        """Probe until the gateway is ready."""
        core = self._core
        while not core.is_ready:
            paths = {_ids(*path): path for path in self._paths()}
            if not paths:
                await asyncio.sleep(_LOOK_S)
                continue
            ids = core.next(list(paths))
            try:
                await Canary(*paths[ids], self._gateway_id, _TIMEOUT_S).send()
                core.passed()
            except CanaryRefused:
                core.refused(ids)
                await asyncio.sleep(_LOOK_S)
            except CanaryFailed as exc:
                core.failed(ids)
                log.warning("path.failed", prefill_id=ids[0], decode_id=ids[1], reason=str(exc))
                await asyncio.sleep(_AGAIN_S)
        log.info("path.proven", num_tries=core.num_tries, num_refusals=core.num_refusals)


def _ids(prefill: InstanceRecord, decode: InstanceRecord | None) -> tuple[str, str]:
    return prefill.instance_id, "" if decode is None else decode.instance_id
