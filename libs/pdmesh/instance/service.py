"""Runs an instance process: it loads an engine, registers, and serves until it is stopped.

The process gets its role from its own settings, or waits as a *blank* instance until the master
assigns a role. An incarnation is one life of an instance, identified by a random number. If the
master withdraws the role, the process frees the engine and registers as a blank instance with a new
number (S23).
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from pdmesh import failpoints
from pdmesh.core.model import Role
from pdmesh.instance.incarnation import role_settings
from pdmesh.instance.incarnation.loading import LoadedEngine, load
from pdmesh.instance.incarnation.member import Member, MeshLinks
from pdmesh.instance.settings import InstanceSettings
from pdmesh.net.nats.assignments import NatsAssignments
from pdmesh.net.nats.bus import NatsBus
from pdmesh.net.nats.registry import NatsRegistry
from pdmesh.service_process import App, collect_everything, new_incarnation


async def serve(settings: InstanceSettings, app: App, role: Role) -> None:
    """Serve until `app.stopping` is set, the engine dies, or another process takes this id.

    With the role NONE, the instance starts blank.
    """
    failpoints.arm(settings.failpoint)
    app.add_readiness("engine", lambda: False)
    own: LoadedEngine | None = None
    if role is not Role.NONE and (own := await _load_own(settings, app, role)) is None:
        return
    bus: NatsBus | None = None
    try:
        bus = await _unless_stopping(
            app, NatsBus.connect(settings.nats_url, app.instance_id, settings.num_nats_replicas)
        )
    finally:
        if bus is None and own is not None:
            await own.stop()
    if bus is None:
        return
    mesh = MeshLinks(bus, NatsRegistry(bus, settings.lease_s), NatsAssignments(bus))
    epoch = 0
    try:
        while True:
            member = Member(settings, app, mesh, own, epoch)
            if not await member.live():
                return
            own, epoch = None, member.epoch
            del member
            collect_everything()  # free arenas and caches now
            app.incarnation = new_incarnation()
    finally:
        await bus.close()


async def _load_own(settings: InstanceSettings, app: App, role: Role) -> LoadedEngine | None:
    """Load the engine of the role in the settings. Returns None if a stop comes first.

    Loading a model takes longer than a process may take to stop, so a stop cancels the load.
    """
    work = load(settings, role_settings.own_role_spec(settings, role), app.incarnation)
    loading = asyncio.create_task(work, name="engine-start")
    await app.until_stopping(loading)
    if loading.done():
        return loading.result()
    loading.cancel()  # only once, because the cancelled load still has to free its memory
    await asyncio.wait([loading])
    return None


async def _unless_stopping(app: App, work: Coroutine[Any, Any, NatsBus]) -> NatsBus | None:
    """Return None if the process is asked to stop before `work` is done."""
    task, stopping = asyncio.create_task(work), asyncio.create_task(app.stopping.wait())
    try:
        await asyncio.wait([task, stopping], return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        stopping.cancel()
