"""Decides which steps of groups and instances are announced to operators, each once and in order.

For example, an instance is loaded, ready, draining or lost, or a group is complete. A phase is how
far an instance has come, as it reports itself. A stage is how far it may go, as the controller
orders.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from pdmesh.core.groups.cluster_state import Observed
from pdmesh.core.groups.domains.folding import is_lone_rank
from pdmesh.core.groups.round import Round
from pdmesh.core.model import Assignment, Phase, Stage

_OF_PHASE: Final = {
    Phase.LOADED: "loaded",
    Phase.CONNECTED: "connected",
    Phase.READY: "ready",
    Phase.DRAINED: "drained",
}
_OF_STAGE: Final = {
    Stage.CONNECT: "connecting",
    Stage.SERVE: "serving",
    Stage.DRAIN: "draining",
}


@dataclass(frozen=True, slots=True)
class AnnounceStep:
    """Announce a step of an instance, of a data-parallel domain, or of a whole group.

    `instance_id` is the id of the instance or the domain. It is empty for a step of the group.
    """

    group_id: str
    step: str
    instance_id: str = ""
    incarnation: int = 0
    assignment_id: int = 0
    role: str = ""
    replaces: str = ""
    detail: str = ""


_Key = tuple[str, int]  # instance, incarnation


@dataclass(slots=True)
class StepAnnouncer:
    """Finds the steps by comparing each round with the last one.

    In a leader's first round, phases are not announced, because an earlier leader has announced
    them.
    """

    group_id: str = ""  # the group that the controller works on now
    _phases: dict[_Key, Phase] | None = None
    _gone: set[_Key] = field(default_factory=set)
    _stuck: set[_Key] = field(default_factory=set)
    _of_group: dict[str, tuple[str, str]] = field(default_factory=dict)
    _announced: list[AnnounceStep] = field(default_factory=list)

    def begin(self, observed: Observed) -> list[AnnounceStep]:
        """Start a round. Returns the steps that instances have made since the last round."""
        steps: list[AnnounceStep] = []
        phases: dict[_Key, Phase] = {}
        for instance_id, assignment in sorted(observed.given.items()):
            seen = observed.seen.get(instance_id)
            if seen is None or seen.incarnation != assignment.incarnation:
                continue
            key = (instance_id, seen.incarnation)
            phases[key] = seen.phase
            is_new = self._phases is not None and self._phases.get(key) is not seen.phase
            is_news = is_new and not is_lone_rank(instance_id, assignment)
            if is_news and seen.phase in _OF_PHASE:
                steps.append(_step(_OF_PHASE[seen.phase], assignment, instance_id))
        self._phases = phases
        return steps

    def lost(self, instance_id: str, assignment: Assignment, detail: str = "") -> bool:
        """Announce, once per incarnation, that an instance is gone without an order to leave.

        Returns False if the loss was announced before. For a domain, `detail` names its lost ranks.
        """
        key = (instance_id, assignment.incarnation)
        if key in self._gone:
            return False
        self._gone.add(key)
        self.announce("lost", assignment, instance_id, detail=detail)
        return True

    def stuck(self, instance_id: str, assignment: Assignment) -> None:
        """Announce, once per incarnation, that an instance does not become blank as ordered."""
        key = (instance_id, assignment.incarnation)
        if key not in self._stuck:
            self._stuck.add(key)
            self.announce("stuck", assignment, instance_id, detail="it does not become blank")

    def announce(
        self,
        step: str,
        assignment: Assignment,
        instance_id: str,
        *,
        detail: str = "",
        replaces: str = "",
    ) -> None:
        self._announced.append(
            _step(step, assignment, instance_id, detail=detail, replaces=replaces)
        )

    def announce_group(self, step: str, detail: str = "") -> None:
        """Announce a step of the current group, unless it is the same as the group's last step."""
        if self._of_group.get(self.group_id) != (step, detail):
            self._of_group[self.group_id] = (step, detail)
            self._announced.append(AnnounceStep(self.group_id, step, detail=detail))

    def end(self, round_: Round) -> list[AnnounceStep]:
        """The other steps of this round, in order.

        First come the controller's announcements, then new stages, then released instances.
        """
        given = round_.observed.given
        steps, self._announced = self._announced, []
        for instance_id, assignment in sorted(round_.plan.items()):
            before = given.get(instance_id)
            is_moved = before is not None and before.stage is not assignment.stage
            is_same = before is not None and before.assignment_id == assignment.assignment_id
            if is_moved and is_same and assignment.stage in _OF_STAGE:
                steps.append(_step(_OF_STAGE[assignment.stage], assignment, instance_id))
        for instance_id, assignment in sorted(given.items()):
            now = round_.plan.get(instance_id)
            is_over = now is None or now.incarnation != assignment.incarnation
            if is_over and assignment.stage >= Stage.DRAIN:
                steps.append(_step("released", assignment, instance_id))
        known = {(i, a.incarnation) for i, a in given.items()}
        self._gone &= known
        self._stuck &= known
        return steps


def _step(
    step: str, assignment: Assignment, instance_id: str, *, detail: str = "", replaces: str = ""
) -> AnnounceStep:
    role_spec = assignment.role_spec
    return AnnounceStep(
        role_spec.group_id,
        step,
        instance_id,
        assignment.incarnation,
        assignment.assignment_id,
        role_spec.role.value,
        replaces,
        detail,
    )
