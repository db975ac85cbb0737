"""Tells the upgrade loop how well each revision of a group serves.

Gateways report answered requests, and instances report failed legs. A leg is a request's stay on
one instance. The upgrade loop compares the revisions by these reports.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
import structlog

from pdmesh.core.placement.fleet import Fleet
from pdmesh.core.upgrade.revision_health import (
    AnswerTimes,
    GroupRevision,
    LegFailureReported,
    RequestAnswered,
    is_failed_leg,
)
from pdmesh.net import subjects
from pdmesh.net.bus import Bus, Message
from pdmesh.services.master_scheduler.placement.scenario_feed import RequestFinishedJson

log = structlog.get_logger(__name__)


class _Header(msgspec.Struct, rename="camel"):
    publisher_id: str = ""


class _ErrorJson(msgspec.Struct, rename="camel"):
    """The fields of the event ErrorReported that are needed here."""

    header: _Header = msgspec.field(default_factory=_Header)
    reason: str = ""
    request_id: str = ""


_error = msgspec.json.Decoder(_ErrorJson)


class UpgradeFeed:
    """`tell` is called for each answer and failure, with the instance's group and revision."""

    def __init__(
        self, fleet: Fleet, bus: Bus, tell: Callable[[RequestAnswered | LegFailureReported], None]
    ) -> None:
        self._fleet, self._bus, self._tell = fleet, bus, tell

    async def run(self) -> None:
        """Runs until cancelled."""
        subscription = await self._bus.subscribe(subjects.error_reported(), self._on_error)
        try:
            await asyncio.Event().wait()
        finally:
            await subscription.unsubscribe()

    def answered(self, event: RequestFinishedJson) -> None:
        """Report a completed request.

        The request counts for the group and revision of its prefill or pooling instance. A decode
        has the same group and revision as the prefill.
        """
        group_revision = self._group_revision(event.prefill_id or event.pooling_id)
        if group_revision is None:
            return
        times = AnswerTimes(event.queue_ms / 1e3, event.ttft_ms / 1e3, event.e2e_ms / 1e3)
        t_p_s = times.t_p_s(is_pooling=bool(event.pooling_id))
        tpot_s = times.tpot_s(event.usage.num_completion_tokens)
        self._tell(RequestAnswered(group_revision, t_p_s, tpot_s))

    async def _on_error(self, message: Message) -> None:
        try:
            event = _error.decode(message.data)
        except msgspec.MsgspecError as exc:
            log.warning("upgrade.bad_event", error=str(exc))
            return
        group_revision = self._group_revision(event.header.publisher_id)
        if group_revision is not None and is_failed_leg(event.reason, event.request_id):
            self._tell(LegFailureReported(group_revision))

    def _group_revision(self, instance_id: str) -> GroupRevision | None:
        instance = self._fleet.instances.get(instance_id)
        if instance is None:
            return None
        return (instance.identity.group_id, instance.identity.revision)
