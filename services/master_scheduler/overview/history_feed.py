"""Collects the events of the last hour that operators can see.

Every master collects them, so that a new leader can show events from before its leadership.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import structlog
from google.protobuf.message import Message as ProtoMessage

from pdmesh.core.history.ended_request import EndedRequest
from pdmesh.core.history.incidents import (
    FaultTurned,
    HealthTurned,
    IncidentBook,
    MemberStepped,
    Ordered,
)
from pdmesh.core.history.kv_flows import KvFlows
from pdmesh.core.history.recent_events import RecentEvents
from pdmesh.core.history.recent_requests import RecentRequests
from pdmesh.core.history.scenario_history import AnswerHistory
from pdmesh.core.placement.fleet import Fleet
from pdmesh.errors import InvalidRequest, shortened
from pdmesh.events.v1 import events_pb2 as events
from pdmesh.net import subjects
from pdmesh.net.bus import Bus, Message
from pdmesh.net.events import decode_event

log = structlog.get_logger(__name__)

_MAX_WORDS: Final = 300  # the most bytes of a text that are kept
_ORDERS: Final[Mapping[str, str]] = {
    "CordonInstance": "taken out of service",
    "UncordonInstance": "put back into service",
}


@dataclass(slots=True)
class Books:
    """The collected events, in one book for each view of the operators' page."""

    answers: AnswerHistory = field(default_factory=AnswerHistory)
    flows: KvFlows = field(default_factory=KvFlows)
    requests: RecentRequests = field(default_factory=RecentRequests)
    incidents: IncidentBook = field(default_factory=IncidentBook)
    happenings: RecentEvents = field(default_factory=RecentEvents)


class HistoryFeed:
    """Fills the books with events from NATS.

    The caller passes ended requests to `on_ended`. `wall` is unix time, for display only.
    """

    def __init__(
        self,
        bus: Bus,
        fleet: Fleet,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.books = Books()
        self._bus, self._fleet, self._clock, self._wall = bus, fleet, clock, wall

    async def run(self) -> None:
        """Runs until cancelled."""
        heard: tuple[tuple[str, type[ProtoMessage], Callable[[Any], None]], ...] = (
            (subjects.health_changed(), events.HealthChanged, self.on_health),
            (subjects.fault_report(), events.FaultReport, self.on_fault),
            (subjects.group_step(), events.GroupStep, self.on_group_step),
            (subjects.upgrade_step(), events.UpgradeStep, self.on_upgrade_step),
            (subjects.leader_changed(), events.LeaderChanged, self.on_leader),
            (subjects.admin_changed(), events.AdminChange, self.on_change),
            (subjects.error_reported(), events.ErrorReported, self.on_error),
        )
        subscriptions = [
            await self._bus.subscribe(subject, _taker(kind, take)) for subject, kind, take in heard
        ]
        try:
            await asyncio.Event().wait()
        finally:
            for subscription in subscriptions:
                await subscription.unsubscribe()

    def on_ended(self, request: EndedRequest) -> None:
        now, books = self._clock(), self.books
        books.answers.handle(request, now, is_served=self._is_served(request))
        books.flows.handle(request, now)
        books.requests.ended(request, self._wall())
        if request.losses:
            books.incidents.handle(request, self._wall())

    def on_health(self, event: events.HealthChanged) -> None:
        turned = HealthTurned(
            event.instance_id, event.instance_incarnation, event.to_health, event.cause
        )
        self.books.incidents.handle(turned, self._wall())

    def on_fault(self, event: events.FaultReport) -> None:
        turned = FaultTurned(
            event.instance_id,
            event.instance_incarnation,
            event.level,
            tuple(signal.reason for signal in event.signals),
            event.action,
            event.held_back,
        )
        self.books.incidents.handle(turned, self._wall())

    def on_group_step(self, event: events.GroupStep) -> None:
        stepped = MemberStepped(
            event.instance_id,
            event.instance_incarnation,
            event.step,
            event.group_id,
            event.role,
            event.replaces,
        )
        self.books.incidents.handle(stepped, self._wall())
        member = f" {event.instance_id}" if event.instance_id else ""
        role = f" as {event.role}" if event.role else ""
        place = f", in place of {event.replaces}" if event.replaces else ""
        detail = f": {event.detail}" if event.detail else ""
        what = f"{event.step.replace('_', ' ')}{member}{role}{place}{detail}"
        self._tell("group", event.group_id, what)

    def on_upgrade_step(self, event: events.UpgradeStep) -> None:
        group = f" {event.group_id}" if event.group_id else ""
        reason = f": {event.reason}" if event.reason else ""
        what = f"upgrade to version {event.version}: {event.step.replace('_', ' ')}{group}{reason}"
        self._tell("upgrade", event.scenario, what)

    def on_leader(self, event: events.LeaderChanged) -> None:
        self._tell("leader", event.leader_id, f"leads, in epoch {event.epoch}")

    def on_change(self, event: events.AdminChange) -> None:
        reason = f": {event.reason}" if event.reason else ""
        author = f", for {event.author}" if event.author else ""
        what = f"{event.action} by {event.who}{author}{reason}"
        self._tell("change", event.about, what)
        if done := _ORDERS.get(event.action):
            ordered = Ordered(event.about, shortened(f"{done} by {event.who}{reason}", _MAX_WORDS))
            self.books.incidents.handle(ordered, self._wall())

    def on_error(self, event: events.ErrorReported) -> None:
        instance_id = event.header.publisher_id
        what = shortened(f"{event.reason}: {event.message}", _MAX_WORDS)
        self._tell("error", instance_id, what)
        if event.request_id:
            self.books.requests.failed_at(instance_id, event.request_id, what, self._wall())

    def _tell(self, kind: str, about: str, what: str) -> None:
        self.books.happenings.add(kind, about, shortened(what, _MAX_WORDS), self._wall())

    def _is_served(self, request: EndedRequest) -> bool:
        """Whether an instance serves the request's scenario.

        If not, the client may have invented the scenario's name, so the request begins no new
        history. An answered request always counts as served, because its instance may have gone
        since then.
        """
        if request.outcome == "completed":
            return True
        instances = self._fleet.instances.values()
        return any(each.identity.scenario == request.scenario for each in instances)


def _taker(kind: type[ProtoMessage], take: Callable[[Any], None]) -> Any:
    """Make a handler for the bus that decodes messages of this kind and passes them to `take`."""

    async def on_message(message: Message) -> None:
        try:
            take(decode_event(message, kind))
        except InvalidRequest as exc:
            log.warning("overview.bad_event", subject=message.subject, error=exc.message)

    return on_message
