"""Loads the engine for a role spec, which names the instance's role, group and model (S20).

Loading fetches and verifies the artefact (the model's files for one role), then builds and starts
the engine. The time of each part is measured.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import structlog

from pdmesh.core.instance.admission import Admission
from pdmesh.core.model import RoleSpec
from pdmesh.engine.base import Engine, EngineInfo
from pdmesh.engine.factory import BuiltEngine, build_engine
from pdmesh.instance.incarnation import artefact, role_settings
from pdmesh.instance.incarnation.artefact import Artefact
from pdmesh.instance.incarnation.model_text import LoadedText, text_of
from pdmesh.instance.legs import instruments
from pdmesh.instance.settings import InstanceSettings
from pdmesh.kv.tiers.peer_lookup import PeerLookup
from pdmesh.v1.common_pb2 import LoadTimings

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class PartTimes:
    """The seconds that each part of a start takes: fetch, verify, build, connect."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self.add(part, time.monotonic() - started)

    def add(self, part: str, seconds: float) -> None:
        self.seconds[part] = seconds
        instruments.load_seconds.update(self.seconds)

    def to_proto(self) -> LoadTimings:
        ms = {f"{part}_ms": round(1000 * seconds) for part, seconds in self.seconds.items()}
        return LoadTimings(**ms)


@dataclass(slots=True)
class LoadedEngine:
    """An engine that has started, with its settings."""

    role_spec: RoleSpec
    settings: InstanceSettings
    built: BuiltEngine
    info: EngineInfo
    holders: PeerLookup | None
    timings: PartTimes
    text: LoadedText

    @property
    def engine(self) -> Engine:
        return self.built.engine

    def admission(self) -> Admission:
        role = self.role_spec.role
        return Admission(role_settings.capacity_of(self.settings, role, self.built, self.info))

    async def stop(self) -> None:
        await self.engine.stop()
        if self.holders is not None:
            await self.holders.close()
        await asyncio.to_thread(self.text.remove)


async def load(settings: InstanceSettings, role_spec: RoleSpec, incarnation: int) -> LoadedEngine:
    """Load and start the engine. If cancelled, stop the engine and free its memory.

    Raises EngineFailed, for example RoleRefused.
    """
    timings = PartTimes()
    settings, verified = await with_artefact(settings, role_spec, timings)
    wanted = role_settings.engine_settings(settings, role_spec.role, incarnation)
    wanted = replace(wanted, domain=role_spec.domain)
    if verified is not None and settings.model_dir == verified.folder:
        wanted = replace(wanted, file_digests=verified.digests)
    tiers = wanted.tiers
    holders = PeerLookup(wanted.instance_id) if tiers.is_on and tiers.uses_peers else None
    built = build_engine(wanted, holders.find if holders is not None else None)
    try:
        with timings.measure("build"):
            info = await built.engine.start()
        text = await text_of(settings.model_dir)
    except BaseException:
        await built.engine.stop()
        raise
    seconds = {part: round(s, 3) for part, s in timings.seconds.items()}
    log.info("engine.started", engine=info.engine, role=role_spec.role.value, seconds=seconds)
    return LoadedEngine(role_spec, settings, built, info, holders, timings, text)


async def with_artefact(
    settings: InstanceSettings, role_spec: RoleSpec, timings: PartTimes
) -> tuple[InstanceSettings, Artefact | None]:
    """Verify the role spec's artefact, if it has one.

    Returns the settings with the options of the artefact and of the role spec, and then the
    artefact. Raises RoleRefused.
    """
    if not role_spec.manifest:
        return role_settings.settings_for(settings, role_spec, {}), None
    found = await asyncio.to_thread(artefact.read, Path(role_spec.manifest))
    artefact.check_role(found, role_spec.role)
    if settings.model_cache_dir is not None:
        found = await asyncio.to_thread(
            artefact.checked_copy, found, settings.model_cache_dir, timings.measure
        )
    else:
        with timings.measure("verify"):
            await asyncio.to_thread(artefact.verify, found)
    manifest = found.manifest
    changed = settings.model_copy(update={"model": manifest.model, "model_dir": found.folder})
    return role_settings.settings_for(changed, role_spec, manifest.config), found
