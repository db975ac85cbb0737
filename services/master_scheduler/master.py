"""Assembles a master-scheduler: fleet, block index, placement, election, gRPC and `control`."""

from __future__ import annotations

import asyncio
import os
import random
from typing import Final

import grpc
import structlog

import pdmesh
from pdmesh.core.access.exposure import is_page_local
from pdmesh.core.groups.membership_changes import GroupTracker
from pdmesh.core.kv.prefix.prefix_index import PrefixIndex
from pdmesh.core.placement.baselines import POLICIES, default
from pdmesh.core.placement.chat_affinity import ChatAffinity
from pdmesh.core.placement.expected_completion import Prices
from pdmesh.core.placement.fleet import Fleet
from pdmesh.core.placement.plan import Placement
from pdmesh.core.placement.policies import Weights
from pdmesh.core.ratio.scenario_stats import Scenarios
from pdmesh.core.request.backpressure import Backpressure
from pdmesh.events.v1.events_pb2 import LeaderChanged
from pdmesh.kv.index.feed import IndexFeed
from pdmesh.kv.index.snapshot_sources import IndexSource
from pdmesh.net import subjects
from pdmesh.net.addresses import join
from pdmesh.net.events import EventPublisher
from pdmesh.net.grpc import rpc
from pdmesh.net.heartbeat import Presence
from pdmesh.net.mesh_link import MeshLink
from pdmesh.net.nats.board import fault_board, health_board
from pdmesh.net.nats.bucket_keeper import BucketKeeper
from pdmesh.net.nats.bus import NatsBus
from pdmesh.net.nats.leader import LeaderElection
from pdmesh.net.nats.registry import NatsRegistry
from pdmesh.net.registry import RecordChanged, RegistryView
from pdmesh.net.tasks import end
from pdmesh.service_process import App
from pdmesh.services.master_scheduler.admin.callers import AdminAccess
from pdmesh.services.master_scheduler.admin.page_routes import page_routes
from pdmesh.services.master_scheduler.control import Control
from pdmesh.services.master_scheduler.instruments import (
    observe_backpressure,
    observe_fleet,
    observe_index,
    observe_registry,
)
from pdmesh.services.master_scheduler.placement.fleet_feed import FleetFeed, MonitorBoards
from pdmesh.services.master_scheduler.placement.group_announcer import GroupAnnouncer
from pdmesh.services.master_scheduler.placement.scenario_feed import ScenarioFeed, ended_of
from pdmesh.services.master_scheduler.placement.servicer import PlanningCores, SchedulerServicer
from pdmesh.services.master_scheduler.settings import Settings
from pdmesh.telemetry import metrics, names
from pdmesh.v1 import admin_service_pb2, scheduler_service_pb2
from pdmesh.v1.common_pb2 import InstanceRecord

log = structlog.get_logger(__name__)

SERVICE: Final = "master-scheduler"


def _placement(fleet: Fleet, settings: Settings, rng: random.Random) -> Placement:
    weights = Weights(
        settings.prefix_weight,
        settings.remote_weight,
        settings.latency_weight,
        settings.load_weight,
        settings.chat_weight,
    )
    policy = POLICIES[settings.policy]()
    if settings.policy == "default":
        policy = default(Prices(settings.future_price, balance=settings.balance_price))
    return Placement(
        fleet,
        rng,
        policy,
        weights,
        settings.max_candidates,
    )


class Master:
    """A master-scheduler. After `start`, all parts run on the event loop until `stop`.

    The caller has connected `bus` and opened `view`, and closes both after `stop`.
    """

    def __init__(
        self,
        settings: Settings,
        app: App,
        bus: NatsBus,
        registry: NatsRegistry,
        view: RegistryView,
        access: AdminAccess,
    ) -> None:
        self._settings, self._app, self._view = settings, app, view
        self._access = access
        self._publisher = EventPublisher(bus, app.instance_id, app.incarnation)
        self.index = PrefixIndex(max_blocks=settings.max_blocks)
        self.fleet = Fleet(chats=ChatAffinity(settings.chat_ttl_s, settings.max_chats))
        self.scenarios = Scenarios()
        groups = GroupTracker()
        placement = _placement(self.fleet, settings, random.Random(app.incarnation))
        self.election = LeaderElection(
            bus, SERVICE, app.instance_id, app.incarnation, settings.lease_s, self._on_leadership
        )
        self._bucket_keeper = BucketKeeper(bus, settings.lease_s)
        self._source = IndexSource(view)
        self._index_feed = IndexFeed(
            self.index, bus, view, self._source, resync_s=settings.resync_s
        )
        self._announcer = GroupAnnouncer(
            self.fleet, groups, self._publisher, lambda: self.election.is_leader
        )
        boards = MonitorBoards(health_board(bus), fault_board(bus))
        self._fleet_feed = FleetFeed(self.fleet, bus, view, boards, self._announcer.wake)
        self.backpressure = Backpressure(
            lambda scenario, now: (
                self.scenarios.phi(scenario, self.fleet.instances.values(), now).prefill
            ),
            settings.max_waiting,
        )
        cores = PlanningCores(placement, self.index, self.backpressure)
        self._control = Control(
            settings,
            access,
            MeshLink(bus, view, self._publisher),
            cores,
            self._leadership,
        )
        is_local = is_page_local(
            has_tls=settings.tls_dir is not None, is_trusted=settings.insecure_network
        )
        app.add_routes(
            page_routes(
                self._control.calls,
                has_token=access.has_token,
                only_host=settings.inner_host if is_local else None,
            )
        )
        self._scenario_feed = ScenarioFeed(
            self.scenarios,
            self._control.windows,
            self.fleet,
            bus,
            self._control.upgrade_feed.answered,
            lambda event: self._control.history.on_ended(ended_of(event)),
        )
        self._presence = Presence(
            registry,
            self._publisher,
            lease_s=settings.lease_s,
            is_ready=lambda: not app.not_ready(),
            on_replaced=app.stopping.set,
        )
        self._servicer = SchedulerServicer(
            cores,
            groups,
            view,
            self._leadership,
        )
        self._server: grpc.aio.Server | None = None
        self._tasks: set[asyncio.Future[None]] = set()
        self.port = 0

    async def start(self) -> None:
        self._view.on_change(self._on_record)
        for record in tuple(self._view.records.values()):
            self.election.saw_epoch(record.epoch)
        self._tasks.add(asyncio.ensure_future(self._bucket_keeper.run()))
        await self._index_feed.start()
        feeds = (
            self._index_feed,
            self._fleet_feed,
            self._scenario_feed,
            self._announcer,
            self._control.upgrade_feed,
        )
        loops = self._control.loops.run()
        for loop in (
            self._heed_stored_epochs(),
            self._access.run(self._control.keys_changed),
            *(f.run() for f in feeds),
            *loops,
        ):
            self._tasks.add(asyncio.ensure_future(loop))
        self._server = rpc.server()
        service = scheduler_service_pb2.DESCRIPTOR.services_by_name["SchedulerService"]
        rpc.add_service(self._server, service, self._servicer)
        admin = admin_service_pb2.DESCRIPTOR.services_by_name["AdminService"]
        rpc.add_service(self._server, admin, self._control.calls)
        settings = self._settings
        self.port = rpc.listen(self._server, join(settings.inner_host, settings.grpc_port))
        await self._server.start()
        self._observe()
        self._tasks.add(self.election.start())
        await self._presence.start(self._record)
        log.info("master.serving", grpc_port=self.port)

    async def stop(self) -> None:
        await self.election.stop()
        await self._presence.stop()
        await self._index_feed.stop()
        await end(self._tasks)
        if self._server is not None:
            await self._server.stop(0.5)
        await self._source.close()

    async def wait_for_failure(self) -> None:
        """Wait until a part fails, and raise its error."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()

    def _record(self) -> InstanceRecord:
        return InstanceRecord(
            instance_id=self._app.instance_id,
            incarnation=self._app.incarnation,
            service=SERVICE,
            region=self._settings.region,
            grpc_address=join(self._settings.reachable_host, self.port),
            ops_address=self._app.ops_address,
            is_leader=self.election.is_leader,
            epoch=self.election.epoch,
            version=pdmesh.__version__,
            pid=os.getpid(),
        )

    def _on_record(self, change: RecordChanged) -> None:
        if change.record is not None:
            self.election.saw_epoch(change.record.epoch)

    async def _heed_stored_epochs(self) -> None:
        self.election.saw_epoch(await self._control.highest_epoch())

    def _leadership(self) -> tuple[bool, int]:
        return self.election.is_leader, self.election.epoch

    def _on_leadership(self, is_leader: bool, epoch: int) -> None:
        self._presence.refresh()
        self._announcer.wake()
        self._control.loops.groups.wake()
        if is_leader:
            event = LeaderChanged(leader_id=self._app.instance_id, epoch=epoch)
            subject = subjects.leader_changed(self._app.instance_id)
            announcing = asyncio.ensure_future(self._publisher.publish(subject, event))
            announcing.add_done_callback(lambda done: done.exception())

    def _observe(self) -> None:
        metrics.gauge(names.LEADER, "1 if this master leads", lambda: self.election.is_leader)
        metrics.total(
            names.LEADER_ELECTIONS,
            "Elections that this master has won since it started",
            lambda: self.election.num_won,
        )
        observe_registry(self._view)
        observe_fleet(self.fleet)
        observe_backpressure(self.backpressure)
        observe_index(self.index, self._index_feed)
        metrics.gauge(
            names.PINS,
            "Prefixes that operators pinned",
            lambda: len(self._control.loops.pins.known),
        )
        metrics.gauge(
            names.ADAPTERS,
            "LoRA adapters that are registered",
            lambda: len(self._control.loops.adapters.known),
        )
