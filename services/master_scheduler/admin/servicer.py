"""AdminService: lets operators see and change the mesh at the leading master.

The desired state is the YAML file of the groups that the mesh should have. If it changes, a canary
may try the new state first: an extra group with a share of the requests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

import structlog
from google.protobuf.message import Message

from pdmesh.core.access.operator_roles import NEEDED
from pdmesh.core.groups.adjustments import CannotMove
from pdmesh.core.groups.desired import (
    DEFAULT_NAME,
    Change,
    Desired,
    Service,
    diff,
)
from pdmesh.core.model import Role
from pdmesh.core.moves.move import MovePlan, Trigger
from pdmesh.core.suggestion import suggestion
from pdmesh.desired_file import read
from pdmesh.errors import InvalidRequest, NotLeader, Unavailable
from pdmesh.instance.incarnation.assignment import ROLES
from pdmesh.net.nats.desired_store import VERSIONS_KEPT
from pdmesh.services.master_scheduler.admin.audit import Changed, of_versions, state_of
from pdmesh.services.master_scheduler.admin.callers import AdminCaller
from pdmesh.services.master_scheduler.admin.control_loops import ControlLoops
from pdmesh.services.master_scheduler.groups.desired_reader import TextWorker
from pdmesh.services.master_scheduler.groups.group_state import group_states
from pdmesh.services.master_scheduler.groups.upgrade_convert import state_to
from pdmesh.services.master_scheduler.plans.ratio_convert import moves_from, profile_from
from pdmesh.v1 import admin_service_pb2 as pb
from pdmesh.v1 import overview_pb2 as looks
from pdmesh.v1.common_pb2 import INSTANCE_PHASE_BLANK

log = structlog.get_logger(__name__)

_MAX_WORDS: Final = 1024  # the most characters of an author, a reason or a name
A = TypeVar("A", bound=Message)


class AdminServicer:
    """The methods of the service. `CheckedCalls` has checked the caller.

    A method that changed something returns Changed, which contains the answer. All other methods
    return the answer. `page_url` returns the URL of the operators' page. `leadership` returns
    whether this process leads now, and its epoch.
    """

    def __init__(
        self,
        page_url: Callable[[], str],
        loops: ControlLoops,
        leadership: Callable[[], tuple[bool, int]],
    ) -> None:
        self._page_url, self._leadership = page_url, leadership
        self._groups, self._view = loops.groups, loops.groups.view
        self._upgrades, self._plans, self._pins = loops.upgrades, loops.plans, loops.pins
        self._adapters = loops.adapters
        self._usage, self._overview = loops.usage, loops.overview
        self._texts = TextWorker()

    async def GetDesired(  # noqa: N802
        self, request: pb.GetDesiredRequest, caller: AdminCaller
    ) -> pb.GetDesiredResponse:
        self._enter()
        found = await self._view.desired.version(request.version)
        if found is None and request.version:
            raise InvalidRequest(f"there is no version {request.version}", field="version")
        return pb.GetDesiredResponse(desired=found)

    async def ListDesiredVersions(  # noqa: N802
        self, request: pb.ListDesiredVersionsRequest, caller: AdminCaller
    ) -> pb.ListDesiredVersionsResponse:
        self._enter()
        versions = await self._view.desired.versions(request.limit or VERSIONS_KEPT)
        for version in versions:
            version.ClearField("text")
        return pb.ListDesiredVersionsResponse(versions=versions)

    async def DiffDesired(  # noqa: N802
        self, request: pb.DiffDesiredRequest, caller: AdminCaller
    ) -> pb.DiffDesiredResponse:
        self._enter()
        after = await self._texts.run(partial(read, request.text))
        current = await self._view.desired.version()
        compared = await self._texts.run(partial(_compared, current, after))
        return pb.DiffDesiredResponse(
            version=current.version if current else 0, changes=compared.changes
        )

    async def ApplyDesired(  # noqa: N802
        self, request: pb.ApplyDesiredRequest, caller: AdminCaller
    ) -> pb.ApplyDesiredResponse | Changed:
        self._enter()
        expected = request.expected_version if request.HasField("expected_version") else None
        applied = await self._apply(
            request.text,
            expected,
            _author(request.author, caller),
            request.reason,
            allow_empty=request.allow_empty,
            canary_share=request.canary_share,
        )
        answer = pb.ApplyDesiredResponse(version=applied.version, changes=applied.changes)
        return applied.told(answer, request.author, request.reason)

    async def RollbackDesired(  # noqa: N802
        self, request: pb.RollbackDesiredRequest, caller: AdminCaller
    ) -> pb.RollbackDesiredResponse | Changed:
        self._enter()
        current = await self._view.desired.version()
        number = request.version or (current.version - 1 if current else 0)
        old = await self._view.desired.version(number) if number > 0 else None
        if current is None or old is None:
            which = f"version {number}" if number > 0 else "earlier version"
            raise InvalidRequest(f"there is no {which} to restore", field="version")
        reason = request.reason or f"back to version {number}"
        applied = await self._apply(
            old.text,
            current.version,
            _author(request.author, caller),
            reason,
            allow_empty=request.allow_empty,
        )
        answer = pb.RollbackDesiredResponse(
            version=applied.version, restored_version=number, changes=applied.changes
        )
        return applied.told(answer, request.author, reason)

    async def PromoteUpgrade(  # noqa: N802
        self, request: pb.PromoteUpgradeRequest, caller: AdminCaller
    ) -> Changed:
        self._enter()
        promoted = await self._upgrades.promote(request.scenario)
        if not promoted:
            which = f"scenario {request.scenario}" if request.scenario else "any scenario"
            raise InvalidRequest(f"there is no canary of {which}", field="scenario")
        before, after = {"canary_shares": promoted}, {"promoted": list(promoted)}
        answer = pb.PromoteUpgradeResponse(scenarios=promoted)
        return Changed(answer, ",".join(promoted), before, after)

    async def PlanMoves(  # noqa: N802
        self, request: pb.PlanMovesRequest, caller: AdminCaller
    ) -> Changed:
        epoch = self._enter()
        scenario = request.scenario or DEFAULT_NAME
        if bool(request.moves) is request.HasField("profile"):
            raise InvalidRequest("give either moves or a profile", field="moves")
        reason = _words(request.reason, "reason") or "asked for by an operator"
        moves = moves_from(request, reason)
        adjustments = self._view.desired.adjustments.groups
        before = {"adjustments": [dict(state_of(each)) for each in adjustments]}
        try:
            if request.HasField("profile"):
                profile = profile_from(request.profile)
                told = self._plans.profiled(scenario, profile, epoch)
            else:
                plan = MovePlan(scenario, Trigger.OPERATOR, moves, reason, request.is_forced)
                told = self._plans.ask(plan, epoch)
        except CannotMove as exc:
            raise InvalidRequest(str(exc), field="scenario") from exc
        after = {
            "asked": dict(state_of(request, "reason")),
            "decisions": [dict(state_of(each)) for each in told],
        }
        return Changed(pb.PlanMovesResponse(decisions=told), scenario, before, after, reason)

    async def ListGroupStates(  # noqa: N802
        self, request: pb.ListGroupStatesRequest, caller: AdminCaller
    ) -> pb.ListGroupStatesResponse:
        epoch = self._enter()
        desired, observed = self._view.version, self._groups.observed
        response = pb.ListGroupStatesResponse(
            epoch=epoch,
            version=desired.version if desired else 0,
            out_of_service=self._view.out_of_service.known,
            adjustments=self._view.desired.adjustments.groups,
            paused=self._groups.paused,
            upgrades=map(state_to, self._upgrades.reports),
            decisions=self._plans.decisions,
            page_url=self._page_url(),
        )
        if observed is not None and observed.epoch == epoch:
            response.seen_version = min(observed.version, self._upgrades.seen_version)
            reports = self._groups.controller.reports
            response.groups.extend(group_states(observed, reports.values()))
        out = {entry.instance_id for entry in self._view.out_of_service.known}
        response.blank_instance_ids.extend(
            instance_id
            for instance_id, record in sorted(self._view.registry.records.items())
            if record.phase == INSTANCE_PHASE_BLANK and instance_id not in out
        )
        return response

    async def GetUsage(  # noqa: N802
        self, request: pb.GetUsageRequest, caller: AdminCaller
    ) -> pb.GetUsageResponse:
        self._enter()
        return pb.GetUsageResponse(book=self._usage.message())

    async def GetOverview(  # noqa: N802
        self, request: looks.GetOverviewRequest, caller: AdminCaller
    ) -> looks.GetOverviewResponse:
        return self._overview.now(_caller_to(caller), self._enter())

    async def GetHistory(  # noqa: N802
        self, request: looks.GetHistoryRequest, caller: AdminCaller
    ) -> looks.GetHistoryResponse:
        self._enter()
        return self._overview.history()

    async def GetRequestStory(  # noqa: N802
        self, request: looks.GetRequestStoryRequest, caller: AdminCaller
    ) -> looks.GetRequestStoryResponse:
        self._enter()
        return self._overview.story(request.request_id)

    async def CordonInstance(  # noqa: N802
        self, request: pb.CordonInstanceRequest, caller: AdminCaller
    ) -> Changed:
        epoch = self._enter()
        _check_mode(request.mode)
        self._check_can_leave(request.instance_id, request.mode)
        reason = _words(request.reason, "reason") or "asked for by an operator"
        entry = pb.OutOfService(instance_id=request.instance_id, mode=request.mode, reason=reason)
        before = state_of(self._view.out_of_service.of(request.instance_id))
        await self._view.out_of_service.take_out(entry, epoch)
        answer = pb.CordonInstanceResponse(out_of_service=entry)
        return Changed(answer, request.instance_id, before, state_of(entry), reason)

    async def UncordonInstance(  # noqa: N802
        self, request: pb.UncordonInstanceRequest, caller: AdminCaller
    ) -> Changed:
        epoch = self._enter()
        before = state_of(self._view.out_of_service.of(request.instance_id))
        fault = await self._view.out_of_service.put_back(request.instance_id, request.mode, epoch)
        after = {"fault": fault} if fault else {}
        answer = pb.UncordonInstanceResponse(fault=fault)
        return Changed(answer, request.instance_id, before, after)

    async def AddPin(  # noqa: N802
        self, request: pb.AddPinRequest, caller: AdminCaller
    ) -> Changed:
        epoch = self._enter()
        for field in ("reason", "model", "tenant", "cache_salt", "scenario"):
            _words(getattr(request, field), field)
        before = state_of(self._pins.known.get(request.pin_id), "blocks")
        pin = await self._pins.add(request, epoch)
        after = state_of(pin, "coverage")
        return Changed(pb.AddPinResponse(pin=pin), pin.pin_id, before, after, request.reason)

    async def ListPins(  # noqa: N802
        self, request: pb.ListPinsRequest, caller: AdminCaller
    ) -> pb.ListPinsResponse:
        self._enter()
        return pb.ListPinsResponse(pins=self._pins.states())

    async def RemovePin(  # noqa: N802
        self, request: pb.RemovePinRequest, caller: AdminCaller
    ) -> Changed:
        epoch = self._enter()
        before = state_of(self._pins.known.get(request.pin_id), "blocks")
        await self._pins.remove(request.pin_id, epoch)
        return Changed(pb.RemovePinResponse(), request.pin_id, before, {})

    async def AddAdapter(  # noqa: N802
        self, request: pb.AddAdapterRequest, caller: AdminCaller
    ) -> Changed:
        epoch = self._enter()
        before = state_of(self._adapters.known.get(request.name))
        added = await self._adapters.add(request, epoch)
        return Changed(added, request.name, before, state_of(added.adapter))

    async def ListAdapters(  # noqa: N802
        self, request: pb.ListAdaptersRequest, caller: AdminCaller
    ) -> pb.ListAdaptersResponse:
        self._enter()
        return pb.ListAdaptersResponse(adapters=self._adapters.states())

    async def RemoveAdapter(  # noqa: N802
        self, request: pb.RemoveAdapterRequest, caller: AdminCaller
    ) -> Changed:
        epoch = self._enter()
        before = state_of(self._adapters.known.get(request.name))
        await self._adapters.remove(request.name, epoch)
        return Changed(pb.RemoveAdapterResponse(), request.name, before, {})

    def _enter(self) -> int:
        """Check that this master leads, and return its epoch. Raises NotLeader."""
        is_leader, epoch = self._leadership()
        if not is_leader:
            leader = next((r for r in self._view.registry.records.values() if r.is_leader), None)
            where = (
                f"; {leader.instance_id} does, at {leader.grpc_address}, and its page is at "
                f"http://{leader.ops_address}/"
                if leader
                else ""
            )
            raise NotLeader(f"this master does not lead{where}")
        return epoch

    def _check_can_leave(self, instance_id: str, mode: int) -> None:
        """Raises InvalidRequest if the instance cannot be taken out of service in this mode."""
        is_assigned = self._view.is_assigned(instance_id)  # true even during a restart
        record = self._view.registry.records.get(instance_id)
        if record is None and not is_assigned:
            hint = suggestion(instance_id, self._view.registry.records)
            raise InvalidRequest(f"there is no {instance_id}{hint}", field="instance_id")
        if record is not None and record.role not in ROLES:
            raise InvalidRequest(
                f"{instance_id} is not an instance but a {record.service}", field="instance_id"
            )
        if record is None or is_assigned or mode != pb.LEAVE_MODE_DRAIN:
            return
        current = self._groups.current
        is_named = current is not None and record.group_id in current[0].groups
        if ROLES.get(record.role, Role.NONE) is not Role.NONE and not is_named:
            raise InvalidRequest(
                f"{instance_id} has its role by its own settings, and no desired group names it, "
                "so it cannot be drained: stop it, or cordon it so that it gets no new requests",
                field="instance_id",
            )

    def _check_canary(self, share: float, after: Desired) -> None:
        """Raises InvalidRequest if the new desired state cannot begin with a canary."""
        if not 0 < share < 1:
            raise InvalidRequest(
                "a canary's share must be more than 0 and less than 1", field="canary_share"
            )
        upgrades, services = self._view.upgrades, _runs(after)
        changed = [
            s for s, each in upgrades.items() if services.get(s, each.settled) != each.settled
        ]
        if not changed:
            raise InvalidRequest(
                "no running service changes, so there is nothing to try out",
                field="canary_share",
            )
        if busy := [s for s in changed if not upgrades[s].is_idle]:
            raise InvalidRequest(
                f"an upgrade of scenario {busy[0]} is under way: promote it or roll it back first",
                field="canary_share",
            )

    async def _apply(
        self,
        text: str,
        expected: int | None,
        author: str,
        reason: str,
        *,
        allow_empty: bool,
        canary_share: float = 0.0,
    ) -> _Applied:
        author, reason = _words(author, "author"), _words(reason, "reason")
        after = await self._texts.run(partial(read, text))
        current = await self._view.desired.version()
        if current is not None and current.text == text and expected in (None, current.version):
            return _Applied(current.version, current.version, [])
        compared = await self._texts.run(partial(_compared, current or self._view.version, after))
        changes = compared.changes
        is_emptied = not after.groups and compared.had_groups
        if is_emptied and not allow_empty:
            raise InvalidRequest(
                "the file has no groups, so every instance would leave; confirm with --allow-empty "
                "(allow_empty)",
                field="groups",
            )
        if canary_share:
            self._check_canary(canary_share, after)
        if not self._leadership()[0]:
            raise Unavailable("this master has just lost the lead; nothing was changed")
        applied = await self._view.desired.apply(
            text,
            expected_version=expected,
            author=author,
            reason=reason,
            canary_share=canary_share,
        )
        return _Applied(current.version if current else 0, applied.version, changes, canary_share)


def _caller_to(caller: AdminCaller) -> looks.Caller:
    needed = {method: str(role) for method, role in NEEDED.items()}
    return looks.Caller(
        who=caller.who, shown_by=caller.shown_by, role=str(caller.role or ""), needed=needed
    )


def _runs(desired: Desired) -> dict[str, Service]:
    """The service of each scenario."""
    return {g.scenario: desired.service_of(g) for g in desired.groups.values()}


@dataclass(frozen=True, slots=True)
class _Applied:
    """A new version of the desired state, with its changes against the version before."""

    version_before: int
    version: int
    changes: list[pb.DesiredChange]
    canary_share: float = 0.0

    def told(self, answer: A, author: str, reason: str) -> A | Changed:
        """The answer with the change, or only the answer if nothing has changed."""
        if self.version == self.version_before:
            return answer
        before, after = of_versions((self.version_before, self.version), self.changes)
        if self.canary_share:
            after = {**after, "canary_share": self.canary_share}
        return Changed(answer, "desired", before, after, reason, author)


@dataclass(frozen=True, slots=True)
class _Compared:
    changes: list[pb.DesiredChange]
    had_groups: bool


def _compared(current: pb.DesiredVersion | None, after: Desired) -> _Compared:
    """Compare the current version with a new one.

    If this release cannot read the current version, the whole new version counts as a change.
    `had_groups` is then true, so that an empty new version still needs a confirmation.
    """
    before, had_groups = Desired(), False
    if current is not None:
        try:
            before = read(current.text)
            had_groups = bool(before.groups)
        except InvalidRequest:
            had_groups = True
            log.warning("admin.unreadable", version=current.version)
    return _Compared([_change_to(change) for change in diff(before, after)], had_groups)


def _change_to(change: Change) -> pb.DesiredChange:
    return pb.DesiredChange(path=change.path, before=change.before, after=change.after)


def _check_mode(mode: int) -> None:
    if mode not in (pb.LEAVE_MODE_DRAIN, pb.LEAVE_MODE_AT_ONCE):
        raise InvalidRequest(f"unknown mode {mode}", field="mode")


def _author(said: str, caller: AdminCaller) -> str:
    """The author of a change: the name in the request, and the name that identified the caller."""
    return f"{said} ({caller.name})".strip() if caller.name else said


def _words(text: str, field: str) -> str:
    if len(text) > _MAX_WORDS:
        raise InvalidRequest(f"must have at most {_MAX_WORDS} characters", field=field)
    return text
