"""Decides when an instance takes too long for a stage of its set-up or its departure.

The group controller orders each instance from stage to stage: load, connect, serve, drain, blank. A
blank instance has no role. If a prefill and a decode do not connect in time, `unpaired.py` decides
which of them is replaced.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pdmesh.core.groups.round import GroupMember, Round, unverified_pairs
from pdmesh.core.groups.unpaired import is_to_blame
from pdmesh.core.model import Phase, Stage


@dataclass(frozen=True, slots=True)
class StageLimits:
    """Limits in seconds. `connect_s`, `serve_s` and `drain_s` limit the stages of these names."""

    react_s: float = 15.0  # until a blank instance begins to follow its assignment
    load_s: float = 600.0  # to fetch a model and build its engine
    connect_s: float = 30.0
    serve_s: float = 15.0
    drain_s: float = 120.0
    disconnect_s: float = 5.0  # after `drain_s`, for the peers to disconnect
    erase_s: float = 30.0  # until an instance that should be blank begins a new incarnation
    gather_s: float = 60.0  # until a group that lost instances in its set-up has found others
    max_tries: int = 3
    cool_s: float = 60.0  # the pause of a group's set-up after `max_tries` failures, or `gather_s`
    avoid_s: float = 300.0  # after a failure, for this time the instance is the last choice


_State = tuple[int, Stage, bool]  # assignment id, stage, whether the instance is ready


@dataclass(slots=True)
class StageClock:
    """Measures how long each instance has been in its stage. Call `note` first in each round.

    The clock of an instance starts when this leader first sees its stage. It starts again when the
    instance begins or ceases to be ready.
    """

    limits: StageLimits = field(default_factory=StageLimits)
    _since: dict[str, tuple[_State, float]] = field(default_factory=dict)
    _avoided: dict[str, float] = field(default_factory=dict)  # until when, by instance

    def note(self, round_: Round, now: float) -> None:
        since: dict[str, tuple[_State, float]] = {}
        for instance_id, assignment in round_.plan.items():
            is_ready = GroupMember(round_.observed.seen[instance_id], assignment).is_ready
            state = (assignment.assignment_id, assignment.stage, is_ready)
            known = self._since.get(instance_id)
            since[instance_id] = known if known and known[0] == state else (state, now)
        self._since = since
        self._avoided = {i: until for i, until in self._avoided.items() if until > now}

    def waited_s(self, member: GroupMember, now: float) -> float:
        """Seconds since the member's clock last started."""
        return now - self._since[member.instance_id][1]

    def avoid(self, instance_id: str, now: float) -> None:
        self._avoided[instance_id] = now + self.limits.avoid_s

    def is_avoided(self, instance_id: str) -> bool:
        return instance_id in self._avoided

    def why_broken(self, round_: Round, member: GroupMember, now: float) -> str:
        """Why a member must become blank at once, or empty if it need not."""
        limits, seen = self.limits, member.seen
        waited_s = self.waited_s(member, now)
        if seen.phase is Phase.FAILED:
            return seen.failure or "it failed without a reason"
        if member.is_elsewhere:
            return "it follows another assignment"
        match member.stage:
            case Stage.LOAD if seen.phase is Phase.BLANK and waited_s > limits.react_s:
                return f"it did not follow its assignment in {limits.react_s:g} s"
            case Stage.LOAD if not member.is_loaded and waited_s > limits.load_s:
                return f"not loaded in {limits.load_s:g} s"
            case Stage.CONNECT if waited_s > limits.connect_s:
                return self._why_unconnected(round_, member, now)
            case Stage.SERVE if not member.is_ready and waited_s > limits.serve_s:
                return f"not ready in {limits.serve_s:g} s"
        return ""

    def is_erase_overdue(self, member: GroupMember, now: float) -> bool:
        """Whether a member has not become blank in time.

        Such a member hangs, or does not follow this leader.
        """
        return member.stage is Stage.BLANK and self.waited_s(member, now) > self.limits.erase_s

    def _why_unconnected(self, round_: Round, member: GroupMember, now: float) -> str:
        """Why the member must be replaced for lack of a connection, or empty if it need not.

        If the member must be replaced, the clocks of all connecting members start again. So they
        have time to connect to the substitute.
        """
        pairs = unverified_pairs(round_.members(member.assignment.role_spec.group_id))
        own = next((pair for pair in pairs if member in pair), None)
        if own is None:
            if member.seen.phase is Phase.CONNECTING:
                return f"its connections were not made in {self.limits.connect_s:g} s"
            return ""
        decode, prefill = own
        if not is_to_blame(member, prefill if member is decode else decode, pairs):
            return ""
        for each in round_.members(member.assignment.role_spec.group_id):
            if each.stage is Stage.CONNECT:
                self._since[each.instance_id] = (self._since[each.instance_id][0], now)
        return f"no verified connection from {decode.instance_id} to {prefill.instance_id}"
