"""Collects the reports of a mesh during a day: its events, and the state of its groups each
second.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from loadtests.day.figure import Action, Point
from loadtests.day.plan import SCENARIO, SPEED, WINDOW_S
from pdmesh.events.v1.events_pb2 import GroupStep, RequestFinished, UpgradeStep
from pdmesh.net import subjects
from pdmesh.net.bus import Message
from pdmesh.net.events import decode_event
from pdmesh.net.nats.bus import NatsBus
from pdmesh.v1 import admin_service_pb2 as pb
from pdmesh.v1.common_pb2 import INSTANCE_PHASE_READY, ROLE_DECODE, ROLE_PREFILL

Shape = tuple[int, int, str]  # prefills, decodes, and the pool that has borrowed the group


@dataclass(slots=True)
class _Window:
    num: int = 0
    num_failed: int = 0
    t_p_s: float = 0.0
    e2e_s: float = 0.0


@dataclass(slots=True)
class Watch:
    """The reports so far. `began` is the start of the run on the monotonic clock.

    Reports from before the start count as if they came at the start.
    """

    actions: list[Action] = field(default_factory=list)
    points: list[Point] = field(default_factory=list)
    replaced: set[str] = field(default_factory=set)  # ids of instances that were replaced by others
    ejected: set[str] = field(default_factory=set)
    upgraded: list[str] = field(default_factory=list)  # steps of the upgrade
    # by how many prefills and decodes each move changed a group
    moves: list[tuple[int, int]] = field(default_factory=list)
    num_lent: int = 0
    num_back: int = 0
    num_migrated: int = 0
    began: float = field(default_factory=time.monotonic)
    _window: _Window = field(default_factory=_Window)
    _adjusted: dict[str, Shape] = field(default_factory=dict)
    _wanted: dict[str, Shape] = field(default_factory=dict)

    async def listen(self, bus: NatsBus) -> None:
        await bus.subscribe(subjects.request_finished(), self._on_finished)
        await bus.subscribe(subjects.group_step(), self._on_step)
        await bus.subscribe(subjects.upgrade_step(), self._on_upgrade)

    def begin(self) -> None:
        """Drop the actions, the replaced instances and the requests so far, since the set-up of the
        groups is not part of the day.
        """
        self.began = time.monotonic()
        self.actions.clear()
        self.replaced.clear()
        self._window = _Window()

    def act(self, kind: str, text: str) -> None:
        at_s = SPEED * (time.monotonic() - self.began)
        self.actions.append(Action(at_s, kind, SCENARIO, text))

    def close_window(self, states: pb.ListGroupStatesResponse, num_asked: int) -> None:
        """End the window, and add its point with the present state of the groups.

        `num_asked` is how many requests were sent in the window.
        """
        window, self._window = self._window, _Window()
        num = window.num
        total = num + window.num_failed
        self.points.append(
            Point(
                SPEED * (time.monotonic() - self.began),
                SCENARIO,
                num_asked / WINDOW_S,
                num / WINDOW_S,
                window.e2e_s / num if num else None,
                window.t_p_s / window.e2e_s if window.e2e_s else None,
                num / total if total else None,
                {**_serving(states), **_lent(states)},
            )
        )

    def look(self, states: pb.ListGroupStatesResponse) -> None:
        """Record changes since the last call: groups adjusted or lent, and instances out of
        service.
        """
        for entry in states.out_of_service:
            if entry.instance_id not in self.ejected:
                self.ejected.add(entry.instance_id)
                self.act("fault", f"{entry.instance_id} is taken out: {entry.reason}")
        adjusted = {a.group_id: (a.num_prefill, a.num_decode, a.pool) for a in states.adjustments}
        reasons = {a.group_id: a.reason for a in states.adjustments}
        wanted = {
            g.group_id: (g.num_prefill_wanted, g.num_decode_wanted, "") for g in states.groups
        }
        for group_id in sorted(adjusted.keys() | self._adjusted.keys()):
            before = self._adjusted.get(group_id, self._wanted.get(group_id))
            after = adjusted.get(group_id, wanted.get(group_id))
            if after is None or before in (None, after):
                continue
            assert before is not None
            self._tell_change(group_id, before, after, reasons.get(group_id, ""))
        self._adjusted, self._wanted = adjusted, {**self._wanted, **wanted}

    def _tell_change(self, group_id: str, before: Shape, after: Shape, reason: str) -> None:
        if after[2]:
            self.num_lent += 1
            self.act("scale", f"{group_id} is lent to {after[2]}")
        elif before[2]:
            self.num_back += 1
            self.act("scale", f"{group_id} is back")
        else:
            self.moves.append((after[0] - before[0], after[1] - before[1]))
            counts = f"{before[0]}P:{before[1]}D becomes {after[0]}P:{after[1]}D"
            self.act("move", f"{group_id}: {counts}{f' ({reason})' if reason else ''}")

    async def _on_finished(self, message: Message) -> None:
        event = decode_event(message, RequestFinished)
        self.num_migrated += event.num_migrations > 0
        if event.outcome != "completed":
            self._window.num_failed += event.outcome == "failed"
            return
        self._window.num += 1
        self._window.t_p_s += (
            event.ttft_ms / 1e3
        )  # includes the wait for a prefill, as in the ratio's own T_p
        self._window.e2e_s += event.e2e_ms / 1e3

    async def _on_step(self, message: Message) -> None:
        event = decode_event(message, GroupStep)
        if event.step == "lost":
            self.act("fault", f"{event.instance_id}, {event.role} of {event.group_id}, is lost")
        if event.step == "assigned" and event.replaces:
            self.replaced.add(event.replaces)
            place = f"as {event.role} of {event.group_id}"
            self.act(
                "substituted", f"{event.instance_id} takes the place of {event.replaces} {place}"
            )

    async def _on_upgrade(self, message: Message) -> None:
        event = decode_event(message, UpgradeStep)
        self.upgraded.append(event.step)
        self.act("upgrade", f"{event.step} {event.group_id} {event.reason}".strip())


def _serving(states: pb.ListGroupStatesResponse) -> dict[str, Shape]:
    def num(group: pb.GroupState, role: int) -> int:
        return sum((m.role, m.phase) == (role, INSTANCE_PHASE_READY) for m in group.members)

    return {g.group_id: (num(g, ROLE_PREFILL), num(g, ROLE_DECODE), "") for g in states.groups}


def _lent(states: pb.ListGroupStatesResponse) -> dict[str, Shape]:
    return {a.group_id: (a.num_prefill, a.num_decode, a.pool) for a in states.adjustments if a.pool}
