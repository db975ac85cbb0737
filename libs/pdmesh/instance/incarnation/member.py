"""One incarnation of an instance process, from its registration to its end.

An incarnation follows its assignment, which is the master's order to this instance, and reports its
progress. `core.instance.lifecycle` decides what to do next. This shell carries out the decisions:
it loads the engine, verifies peers, serves, drains and erases. It passes the results to that core.
Peers are instances of the same group and the other role. Erasing an incarnation ends it and frees
its engine.

If a task fails, or if a task ends that must run forever, the process fails, and its supervisor
starts the process again.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Final

import structlog

from pdmesh.config import node_status_file
from pdmesh.core.instance import lifecycle_events as life
from pdmesh.core.instance.engine_watchdog import EngineWatchdog
from pdmesh.core.instance.lifecycle import InstanceLife
from pdmesh.core.model import Peer, Phase, RoleSpec, Tick
from pdmesh.engine.base import KvPeer
from pdmesh.errors import EngineFailed, InvalidRequest, MeshError
from pdmesh.instance.incarnation.adapter_follower import AdapterFollower
from pdmesh.instance.incarnation.assignment import assignment_from
from pdmesh.instance.incarnation.domain_address import MeetingPoint
from pdmesh.instance.incarnation.loading import LoadedEngine, load
from pdmesh.instance.incarnation.record import record_of
from pdmesh.instance.incarnation.self_restart import (
    RestartVerdict,
    Watchdog,
    device_names,
    node_reader,
)
from pdmesh.instance.incarnation.serving import Serving
from pdmesh.instance.legs import instruments
from pdmesh.instance.settings import InstanceSettings
from pdmesh.kv.index.pinned import PinFollower, prefixes_for
from pdmesh.net.assignments import Assignments
from pdmesh.net.events import EventPublisher
from pdmesh.net.heartbeat import Presence
from pdmesh.net.nats.board import adapter_board, fault_board, pin_board
from pdmesh.net.nats.bus import NatsBus
from pdmesh.net.registry import Registry
from pdmesh.net.tasks import end
from pdmesh.service_process import App, exclude_from_collection
from pdmesh.telemetry import names
from pdmesh.v1.admin_service_pb2 import Pin
from pdmesh.v1.common_pb2 import InstanceRecord
from pdmesh.v1.groups_pb2 import Assignment

log = structlog.get_logger(__name__)

_TICK_S: Final = 0.5
_MAX_CHECKS: Final = 8  # peers that are verified at once


@dataclass(frozen=True, slots=True)
class MeshLinks:
    """The process's connections to the mesh, which all its incarnations use."""

    bus: NatsBus
    registry: Registry
    assignments: Assignments


class Member:
    """One incarnation.

    `own` is the loaded engine of an instance whose settings give it a role. None means that the
    instance is blank until the master assigns a role.
    """

    def __init__(
        self,
        settings: InstanceSettings,
        app: App,
        mesh: MeshLinks,
        own: LoadedEngine | None,
        epoch: int,
    ) -> None:
        self._settings, self._app = settings, app
        self._registry, self._assignments = mesh.registry, mesh.assignments
        self._faults, self._pin_board = fault_board(mesh.bus), pin_board(mesh.bus)
        self._adapter_board = adapter_board(mesh.bus)
        self._pins: PinFollower | None = None
        self._adapters: AdapterFollower | None = None
        self._life = InstanceLife(
            app.incarnation, own.role_spec if own is not None else None, epoch
        )
        self._own = own
        self._meeting = MeetingPoint(
            settings.inner_host, settings.reachable_host, settings.domain_port
        )
        self._events = EventPublisher(mesh.bus, app.instance_id, app.incarnation)
        self._presence = Presence(
            mesh.registry,
            self._events,
            lease_s=settings.lease_s,
            is_ready=lambda: not app.not_ready(),
            on_replaced=app.stopping.set,
        )
        self._serving: Serving | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._died: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._erased = asyncio.Event()
        self._is_stopping = False
        self._loading: asyncio.Task[None] | None = None
        self._idle: asyncio.Task[None] | None = None
        self._checks = asyncio.Semaphore(_MAX_CHECKS)
        self._connecting_since: float | None = None

    @property
    def epoch(self) -> int:
        """The highest epoch (number of a master's leadership) of all assignments so far."""
        return self._life.epoch

    async def live(self) -> bool:
        """Run the incarnation to its end.

        Returns True if the incarnation ends because the master has withdrawn or changed the role.
        The process then begins another incarnation. Returns False once the process was asked to
        stop and has drained. Raises the error of a task that must not end.
        """
        feed = None
        try:
            if self._own is not None:
                await self._serve(self._own)
                self._admit()
            self._app.add_readiness("engine", lambda: self._life.phase not in _NOT_READY)
            self._app.add_readiness("registered", lambda: self._presence.is_held)
            self._spawn(self._register(), "register", may_end=False)
            self._spawn(self._tick_often(), "tick", may_end=False)
            feed = self._assignments.follow(self._app.instance_id, self._on_assignment)
            if await self._until(self._app.stopping.wait(), self._erased.wait()) == 0:
                await self._drain()
                return False
            return True
        finally:
            if feed is not None:
                await feed.close()
            await self._leave()

    # -- events for the core -----------------------------------------------------------------------

    def _on_assignment(self, message: Assignment) -> None:
        try:
            assignment = assignment_from(message)
        except InvalidRequest as exc:
            log.warning("assignment.bad", field=exc.field, error=exc.message)
            return
        self._step(life.Assigned(assignment))

    async def _tick_often(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            self._step(Tick())

    def _step(self, event: life.Event) -> None:
        if self._is_stopping:
            return  # this process stops; the next process follows the assignment
        before = self._life.phase, self._life.verified_peers, self._life.failed_peers
        was_assigned = self._life.assignment
        for effect in self._life.handle(event, time.monotonic()):
            self._carry_out(effect)
        self._measure_connecting()
        after = self._life.phase, self._life.verified_peers, self._life.failed_peers
        if before != after or was_assigned is not self._life.assignment:
            self._tell(before[0])

    def _tell(self, before: Phase) -> None:
        phase = self._life.phase
        if phase is not before:
            log.info("instance.phase", phase=phase.name.lower(), failure=self._life.failure or None)
        self._presence.refresh()

    def _measure_connecting(self) -> None:
        if self._serving is None:
            return
        if self._life.phase is Phase.CONNECTING:
            self._connecting_since = self._connecting_since or time.monotonic()
        elif self._connecting_since is not None:
            took_s = time.monotonic() - self._connecting_since
            self._serving.loaded.timings.add("connect", took_s)
            self._connecting_since = None

    # -- the core's effects ------------------------------------------------------------------------

    def _carry_out(self, effect: life.Effect) -> None:
        match effect:
            case life.LoadEngine(role_spec):
                self._loading = self._spawn(self._load(role_spec), "load")
            case life.Verify(peer):
                self._spawn(self._verify(peer), f"verify-{peer.id.instance_id}")
            case life.ForgetPeer(peer):
                if self._serving is not None:
                    self._serving.loaded.engine.forget_peer(_kv_peer(peer))
            case life.AdmitRequests():
                self._admit()
            case life.RefuseRequests():
                self._refuse()
            case life.Erase():
                self._erased.set()
            case life.Ignored.OTHER_INCARNATION:
                log.debug("assignment.ignored", why=effect.value)
            case life.Ignored():
                log.warning("assignment.ignored", why=effect.value)

    async def _load(self, role_spec: RoleSpec) -> None:
        self._meeting.give_up()  # if this is rank 0 of a domain, its engine binds this port
        try:
            loaded = await load(self._settings, role_spec, self._app.incarnation)
        except EngineFailed as exc:
            log.error("instance.load_failed", reason=exc.reason, error=exc.message)
            self._step(life.LoadFailed(f"{exc.reason}: {exc.message}"))
            return
        try:
            await self._serve(loaded)
        except BaseException:
            await loaded.stop()
            raise
        self._step(life.Loaded())

    async def _serve(self, loaded: LoadedEngine) -> None:
        """Listen, but refuse requests until `_admit`."""
        serving = Serving(
            loaded, self._events, self._app.service, self._record, self._presence.refresh
        )
        for work in await serving.start(self._registry):
            self._mind(work, may_end=False)
        self._serving, self._own = serving, None
        self._pins = PinFollower(self._pin_board, lambda pins: _pin(loaded, pins))
        if loaded.info.max_adapters:
            self._adapters = AdapterFollower(self._adapter_board, loaded.engine.keep_adapters)
        self._watch_over(serving)
        exclude_from_collection()  # most Python objects of the process belong to the engine

    def _watch_over(self, serving: Serving) -> None:
        settings, app = self._settings, self._app
        devices = device_names(settings.devices, app.instance_id, os.environ)
        file = settings.node_status_file or node_status_file(settings.state_dir)
        watchdog = Watchdog(
            serving.host,
            EngineWatchdog(settings.engine_slow_s, settings.engine_hung_s),
            RestartVerdict(self._faults, app.instance_id, app.incarnation),
            self._presence.refresh,
            node_reader(file, devices),
        )
        self._presence.describe = watchdog.describe
        self._spawn(watchdog.run(), "watchdog", may_end=False)

    async def _verify(self, peer: Peer) -> None:
        assert self._serving is not None
        async with self._checks:
            engine, timeout_s = self._serving.loaded.engine, self._settings.peer_verify_s
            try:
                await engine.verify_peer(_kv_peer(peer), timeout_s)
            except MeshError as exc:
                instruments.peer_checks.add(1, {names.ATTR_OUTCOME: exc.reason.lower()})
                log.warning(
                    "peer.failed", peer=peer.id.instance_id, reason=exc.reason, error=exc.message
                )
                self._step(life.PeerFailed(peer.id, exc.reason))
                return
        instruments.peer_checks.add(1, {names.ATTR_OUTCOME: "verified"})
        self._step(life.PeerVerified(peer.id))

    def _admit(self) -> None:
        assert self._serving is not None
        if self._idle is not None:
            self._idle.cancel()
        self._serving.admit()

    def _refuse(self) -> None:
        assert self._serving is not None
        self._serving.refuse()
        self._idle = self._spawn(self._say_when_idle(self._serving), "drain")

    async def _say_when_idle(self, serving: Serving) -> None:
        await serving.host.wait_idle()
        self._step(life.BecameIdle())

    def _record(self) -> InstanceRecord:
        return record_of(
            self._life,
            self._app,
            self._settings,
            self._serving,
            self._is_stopping,
            self._meeting.address if self._life.role_spec is None else "",
        )

    # -- tasks and the end ------------------------------------------------------------------------

    async def _register(self) -> None:
        """Register and send heartbeats. Raises the error that ended the heartbeats.

        Never returns. If another process took the id, waits until this process stops.
        """
        await self._presence.start(self._record)
        await self._presence.watch()
        await asyncio.Event().wait()

    def _spawn(
        self, work: Coroutine[Any, Any, None], name: str, *, may_end: bool = True
    ) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        self._mind(task, may_end)
        return task

    def _mind(self, task: asyncio.Task[None], may_end: bool) -> None:
        task.add_done_callback(lambda done: self._on_done(done, may_end))

    def _on_done(self, task: asyncio.Task[None], may_end: bool) -> None:
        self._tasks.discard(task)
        if task.cancelled() or self._died.done():
            return
        error = task.exception()
        if error is None and not may_end:
            error = EngineFailed(f"{task.get_name()} ended by itself")
        if error is not None:
            self._died.set_exception(error)

    async def _until(
        self, *events: Coroutine[Any, Any, object], timeout_s: float | None = None
    ) -> int:
        """Wait for the first event and return its index, or -1 if no event came in time.

        Raises the error of any task that failed.
        """
        waiters: list[asyncio.Future[Any]] = [asyncio.ensure_future(event) for event in events]
        try:
            await asyncio.wait(
                [*waiters, self._died], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            if self._died.done():
                self._died.result()
            return next((n for n, waiter in enumerate(waiters) if waiter.done()), -1)
        finally:
            for waiter in waiters:
                waiter.cancel()

    async def _drain(self) -> None:
        """Refuse new requests, and give the running ones up to `drain_s` to finish."""
        self._is_stopping = True
        if self._serving is None:
            return
        host = self._serving.host
        host.drain(True)
        self._presence.refresh()
        log.info("instance.draining", num_slots_used=host.admission.num_slots_used)
        if await self._until(host.wait_idle(), timeout_s=self._settings.drain_s) < 0:
            log.warning("instance.drain_cut", num_slots_used=host.admission.num_slots_used)

    async def _leave(self) -> None:
        """End all tasks of this incarnation, deregister, and stop the engine."""
        self._died.cancel()  # from now on, every task may end
        if self._loading is not None and not self._loading.done():
            self._loading.cancel()  # only once, because the cancelled load still has to free memory
            await asyncio.wait([self._loading])
        await end(self._tasks)
        self._meeting.give_up()
        for follower in (self._pins, self._adapters):
            if follower is not None:
                await follower.close()
        if self._serving is not None and self._erased.is_set():
            await self._serving.erase_blocks()
        await self._presence.stop()
        if self._serving is not None:
            await self._serving.stop()
        elif self._own is not None:
            await self._own.stop()


_NOT_READY: Final = (Phase.LOADING, Phase.FAILED)


def _pin(loaded: LoadedEngine, pins: Sequence[Pin]) -> None:
    """Apply the operators' pins (orders to keep a prefix's KV) that concern this engine."""
    scenario = loaded.role_spec.scenario
    loaded.engine.pin(prefixes_for(pins, loaded.info.model_fingerprint, scenario))


def _kv_peer(peer: Peer) -> KvPeer:
    return KvPeer(peer.id.instance_id, peer.id.incarnation, peer.addresses)
