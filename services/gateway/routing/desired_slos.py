"""Takes the SLOs of scenarios from the desired state as soon as it changes (S9, S44).

A scenario is a kind of requests with its own groups of instances. The desired state is the
operators' YAML file of services and groups, which NATS stores in numbered versions. For a scenario
without SLOs in this file, the gateway's settings apply. A version that this release cannot read
changes nothing. While NATS is unreachable, the last version stays valid.
"""

from __future__ import annotations

import asyncio

import structlog

from pdmesh.core.request.slo import Slos
from pdmesh.desired_file import read
from pdmesh.errors import InvalidRequest
from pdmesh.net.nats.desired_store import DesiredStore
from pdmesh.net.nats.kv_bucket import KvWatch
from pdmesh.net.tasks import end
from pdmesh.v1.admin_service_pb2 import DesiredVersion

log = structlog.get_logger(__name__)


class DesiredSlos:
    """Replaces `slos.scenarios` for each new version, between `watch` and `close`."""

    def __init__(self, slos: Slos) -> None:
        self._slos, self._own = slos, dict(slos.scenarios)
        self._latest: DesiredVersion | None = None
        self._has_latest = asyncio.Event()
        self._watch: KvWatch | None = None
        self._reading: asyncio.Task[None] | None = None

    def watch(self, store: DesiredStore) -> None:
        self._watch = store.watch_current(self._on_version)
        self._reading = asyncio.create_task(self._read(), name="desired-slos")

    async def close(self) -> None:
        if self._watch is not None:
            await self._watch.close()
        if self._reading is not None:
            await end([self._reading])

    def _on_version(self, version: DesiredVersion) -> None:
        self._latest = version
        self._has_latest.set()

    async def _read(self) -> None:
        """Parse new versions in a thread, because parsing a long file would delay tokens."""
        while True:
            await self._has_latest.wait()
            self._has_latest.clear()
            assert self._latest is not None
            version = self._latest
            try:
                desired = await asyncio.to_thread(read, version.text)
            except InvalidRequest as exc:
                log.warning("slos.unreadable", version=version.version, error=exc.message)
                continue
            found = {name: each.slo for name, each in desired.scenarios.items() if each.slo}
            self._slos.scenarios = {**self._own, **found}
            log.info("slos.read", version=version.version, scenarios=sorted(found))
