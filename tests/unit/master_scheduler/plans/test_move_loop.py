"""Plans of moves are carried out with the real group controller, one move at a time.

For example, a schedule lends a group at night and takes it back in the morning.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest

from pdmesh.core.groups.adjustments import Adjustment, adjusted, num_lent
from pdmesh.core.groups.cluster_state import Observed
from pdmesh.core.groups.controller import GroupController
from pdmesh.core.groups.desired import (
    SERVING_ROLES,
    Desired,
    Group,
    Scenario,
    ScheduleLine,
)
from pdmesh.core.groups.round import Round
from pdmesh.core.model import Role
from pdmesh.core.moves.move import (
    Move,
    MoveKind,
    MovePlan,
    Trigger,
)
from pdmesh.core.moves.next_move import RESUME_WITHIN_S
from pdmesh.core.placement.fleet import (
    Fleet,
    InstanceRecorded,
    LoadReported,
    PrefillComputed,
)
from pdmesh.core.placement.instance import Identity
from pdmesh.core.ratio.scenario_stats import RequestSample
from pdmesh.core.ratio.scenario_windows import ScenarioWindows
from pdmesh.desired_file import read
from pdmesh.errors import Unavailable
from pdmesh.services.master_scheduler.groups.desired_convert import adjustments_from
from pdmesh.services.master_scheduler.plans import move_loop
from pdmesh.services.master_scheduler.plans.move_loop import MoveLoop
from pdmesh.v1.admin_service_pb2 import Adjustments
from tests.fakes.group_world import LIMITS, World
from tests.support.logs import capture_logs_of

NIGHT = datetime(2026, 11, 20, 22, 0, tzinfo=UTC).timestamp()
MORNING = datetime(2026, 11, 21, 7, 0, tzinfo=UTC).timestamp()
DAY = 86_400.0
DESIRED = Desired(
    groups={"a": Group("chat", 2, 2), "b": Group("chat", 2, 2)},
    schedules=(
        ScheduleLine("0 22 * * *", "chat", "lend"),
        ScheduleLine("0 7 * * *", "chat", "reclaim"),
    ),
)


class Site:
    """Stands in for a GroupReconciler and its view, with simulated instances.

    It has only the members that the plan loop uses.
    """

    def __init__(self, desired: Desired, num: int) -> None:
        self.desired, self.stored = desired, Adjustments()
        self.world = World(desired, num=num)
        self.fleet = Fleet()
        self.wall = NIGHT - 3600
        self.used = {Role.PREFILL: 1, Role.DECODE: 1}  # the slots in use at each instance, by role
        self.is_up, self.paused = True, ""
        self.windows = ScenarioWindows()
        self.loop = self.new_loop()

    def new_loop(self) -> MoveLoop:
        site: Any = self
        return MoveLoop(
            site, self.windows, lambda: (True, self.world.epoch),
            lambda: self.world.now, lambda: self.wall
        )  # fmt: skip

    def elect(self) -> None:
        """Let another master lead. It knows only what is stored."""
        self.world.elect()
        self.loop = self.new_loop()

    @property
    def view(self) -> SimpleNamespace:
        """Stands in for a ClusterView. The site itself is the view's book of the desired state."""
        return SimpleNamespace(
            fleet=self.fleet,
            desired=self,
            upgrades=self.world.upgrades,
            fired=dict(self.stored.fired),
        )

    async def adjust(self, adjustments: Adjustments) -> None:
        if not self.is_up:
            raise Unavailable("the store is away")
        self.stored = adjustments

    @property
    def adjustments(self) -> Adjustments:
        return self.stored

    @property
    def current(self) -> tuple[Desired, dict[str, Adjustment]]:
        return self.desired, adjustments_from(self.stored)

    @property
    def observed(self) -> Observed:
        return self.world.observe()

    @property
    def controller(self) -> GroupController:
        return self.world.controller

    def blanks(self, racks: tuple[str, ...] = ()) -> Counter[str]:
        """The number of blank instances, counted as the reconciler does."""
        return Round(self.world.observe()).num_blanks(racks)

    def settle(self) -> None:
        """Let the group controller reach the desired state, and report loads."""
        known = adjustments_from(self.stored)
        self.world.desired = adjusted(self.desired, known)
        self.world.num_lent = num_lent(self.desired, known)
        self.world.settle()
        for group_id in self.world.counts():
            for role in SERVING_ROLES:
                for name in self.world.ready(group_id, role):
                    self._hear(name, group_id, role)

    def _hear(self, name: str, group_id: str, role: Role) -> None:
        identity = Identity(name, 1, role, group_id, "chat", "m", "f", 64, 8, 1000, 4096)
        self.fleet.handle(InstanceRecorded(identity), 0.0)
        used = self.used.get(role, 1)
        self.fleet.handle(LoadReported(name, 1, 8, used, 1000, is_draining=False), 0.0)


@pytest.mark.req("S11", "S21")
async def test_a_group_is_lent_at_night_and_back_before_the_morning() -> None:
    site = Site(DESIRED, num=8)
    site.settle()
    await site.loop.round()
    assert not site.stored.groups
    site.wall = NIGHT + 1
    await site.loop.round()
    assert [(g.group_id, g.pool) for g in site.stored.groups] == [("b", "training")]
    site.settle()
    assert sorted(site.world.counts()) == ["a"]
    assert site.world.observe().wanted.num_lent == {"": 4}
    await site.loop.round()
    site.world.elect()  # after the election, a time that has fired does not fire again
    site.settle()
    site.wall = NIGHT + 60
    await site.loop.round()
    assert len(site.stored.groups) == 1
    site.wall = MORNING - 200  # early enough for the group to be back in time
    await site.loop.round()
    assert not site.stored.groups
    site.settle()
    assert sorted(site.world.counts()) == ["a", "b"]


@pytest.mark.req("S11", "S21")
async def test_a_group_that_took_long_to_set_up_is_taken_back_earlier_the_next_morning() -> None:
    site = Site(DESIRED, num=8)

    async def at(wall: float, lasts_s: float = 0.0) -> None:
        site.wall = wall
        await site.loop.round()
        site.settle()
        site.world.now += lasts_s
        await site.loop.round()

    await at(NIGHT - 60)
    await at(NIGHT)
    await at(MORNING - 200, lasts_s=600.0)
    assert not site.stored.groups
    await at(NIGHT + DAY)
    await at(MORNING + DAY - 1200)
    assert [g.pool for g in site.stored.groups] == ["training"]
    await at(MORNING + DAY - 850)  # 1.5 times the duration of the last set-up
    assert not site.stored.groups


@pytest.mark.req("S28")
async def test_an_adjustment_that_a_file_overruled_stays_gone_when_the_file_is_rolled_back() -> (
    None
):
    site = Site(DESIRED, num=8)
    site.settle()
    await site.loop.round()
    site.wall = NIGHT + 1
    await site.loop.round()
    site.settle()
    await site.loop.round()
    assert [g.group_id for g in site.stored.groups] == ["b"]
    site.desired = replace(DESIRED, groups={"a": Group("chat", 2, 2), "b": Group("chat", 3, 1)})
    await site.loop.round()
    site.settle()
    site.desired = DESIRED  # the file is rolled back in the middle of the night
    site.settle()
    await site.loop.round()
    assert not site.stored.groups
    assert sorted(site.world.counts()) == ["a", "b"]


@pytest.mark.req("S29")
async def test_requests_for_unserved_scenarios_switch_no_ratio_off() -> None:
    desired = Desired(
        scenarios={"chat": Scenario(has_auto_ratio=True)}, groups={"a": Group("chat", 2, 4)}
    )
    site = Site(desired, num=6)
    site.settle()
    await site.loop.round()
    for i in range(10_000):
        site.windows.failed(f"no-such-{i}")
    site.windows.finished(RequestSample("chat", 1000, 0, 100, 0.0, 0.2, 1.0, 0.01))
    assert site.windows.close("no-such-0", None, None, 1.0) is None
    window = site.windows.close("chat", None, None, 1.0)
    assert window is not None
    assert window.num_requests == 1


async def test_requests_before_a_leadership_are_in_none_of_its_windows() -> None:
    site = Site(DESIRED, num=8)
    site.settle()
    await site.loop.round()
    site.windows.finished(RequestSample("chat", 1000, 0, 100, 0.0, 0.2, 1.0, 0.01))
    site.elect()
    site.settle()
    await site.loop.round()
    assert site.windows.close("chat", None, None, 1.0) is None


@pytest.mark.req("S11", "S21")
async def test_groups_of_fusion_instances_are_lent_by_the_clock_too() -> None:
    groups = {"a": Group("chat", 0, 0, fusion=2), "b": Group("chat", 0, 0, fusion=2)}
    site = Site(Desired(groups=groups, schedules=DESIRED.schedules), num=4)
    site.settle()
    await site.loop.round()
    site.wall = NIGHT + 1
    await site.loop.round()
    site.settle()
    assert sorted(site.world.counts()) == ["a"]
    await site.loop.round()
    site.wall = MORNING - 200
    await site.loop.round()
    site.settle()
    assert sorted(site.world.counts()) == ["a", "b"]


@pytest.mark.req("S11", "S21", "S31")
async def test_a_pair_is_lent_if_its_scenario_allows_a_single_pair() -> None:
    groups = {"a": Group("chat", 1, 1), "b": Group("chat", 1, 1)}
    scenarios = {"chat": Scenario(allow_single=True)}
    site = Site(Desired({}, scenarios, groups, DESIRED.schedules), num=4)
    site.settle()
    await site.loop.round()
    site.wall = NIGHT + 1
    await site.loop.round()
    site.settle()
    assert sorted(site.world.counts()) == ["a"]


@pytest.mark.req("S21", "S28")
async def test_a_reclaim_that_finds_no_instances_ends_its_plan_and_serves_when_they_come() -> None:
    site = Site(DESIRED, num=8)
    site.settle()
    await site.loop.round()
    site.wall = NIGHT + 1
    await site.loop.round()
    site.settle()
    await site.loop.round()
    for name in [i for i in site.world.processes if i not in site.world.given][:2]:
        site.world.kill(name)
    site.wall = MORNING - 200
    await site.loop.round()
    site.settle()
    await site.loop.round()
    assert (site.loop.planning(), site.loop.gathering()) == ({"chat"}, {"chat"})
    site.world.now += LIMITS.gather_s
    await site.loop.round()
    assert (site.loop.planning(), site.loop.gathering()) == (set(), set())
    assert site.loop.decisions[-1].reason.endswith("; 2 more blank instances needed")
    for name in ("late-0", "late-1"):
        site.world.start(name)
    site.settle()
    assert sorted(site.world.counts()) == ["a", "b"]


@pytest.mark.req("S28")
async def test_a_role_change_within_a_group_does_not_count_as_a_lack_of_instances() -> None:
    """The group lacks an instance only until the leaving instance is blank."""
    site = Site(Desired(groups={"a": Group("chat", 2, 4)}), num=6)
    site.settle()
    await site.loop.round()
    move = Move("a", MoveKind.CHANGE_ROLE, Role.PREFILL)
    plan = MovePlan("chat", Trigger.OPERATOR, (move,), "by hand", is_forced=True)
    site.loop.ask(plan, site.world.epoch)
    await site.loop.round()
    known = adjustments_from(site.stored)
    site.world.desired = adjusted(site.desired, known)
    for _ in range(4):
        site.world.round()
        await site.loop.round()
        assert not site.loop.gathering()
    site.settle()
    await site.loop.round()
    assert not site.loop.planning()
    assert site.world.counts() == {"a": (3, 3, 0)}


@pytest.mark.req("S21")
async def test_a_line_inserted_above_a_schedule_neither_repeats_nor_skips_it() -> None:
    site = Site(DESIRED, num=8)
    site.settle()
    await site.loop.round()
    above = ScheduleLine("0 3 * * *", "chat", "lend")
    site.desired = replace(DESIRED, schedules=(above, *DESIRED.schedules))
    # No round ran for a minute. In that minute the schedule was due and the file was changed.
    site.wall = NIGHT + 60
    await site.loop.round()
    assert [g.group_id for g in site.stored.groups] == ["b"]


async def test_a_move_that_could_not_be_written_does_not_count_as_made() -> None:
    site = Site(DESIRED, num=8)
    site.settle()
    await site.loop.round()
    site.wall, site.is_up = NIGHT + 1, False
    with pytest.raises(Unavailable):
        await site.loop.round()
    assert not site.stored.groups
    assert not site.loop._runner.moving


async def test_a_move_that_could_not_be_written_is_tried_again() -> None:
    site = Site(DESIRED, num=8)
    site.settle()
    await site.loop.round()
    site.wall, site.is_up = NIGHT + 1, False
    for _ in range(3):
        with pytest.raises(Unavailable):
            await site.loop.round()
    site.is_up = True
    await site.loop.round()
    assert [g.group_id for g in site.stored.groups] == ["b"]


@pytest.mark.req("S21")
async def test_groups_are_added_and_removed_by_the_clock_within_a_second_and_one_at_a_time() -> (
    None
):
    """In the evening two groups are removed, and a group of another scenario takes the instances.

    At eight o'clock they are added again, and not earlier.
    """
    text = """
    scenarios: {chat: {}, batch: {}}
    groups:
      chat: {scenario: chat, count: 3, prefill: 2, decode: 2}
      nightly: {scenario: batch, prefill: 2, decode: 2}
    schedules:
      - {at: "0 22 * * *", scenario: chat, remove: 2}
      - {at: "0 8 * * *", scenario: chat, add: 2}
    """
    site = Site(read(text), num=12)
    assert NIGHT - site.wall == 3600

    async def at(wall: float) -> list[str]:
        site.wall = wall
        await site.loop.round()
        site.settle()
        await site.loop.round()
        site.settle()
        return sorted(site.world.counts())

    day = ["chat-0", "chat-1", "chat-2"]
    assert await at(NIGHT - 1) == day
    site.wall = NIGHT
    await site.loop.round()
    assert lent(site) == ["chat-2"]  # the second group follows when the first move is complete
    assert await at(NIGHT + 1) == ["chat-0", "nightly"]
    assert {g.pool for g in site.stored.groups} == {"off"}
    assert site.world.num_lent == {}
    eight = NIGHT + 10 * 3600
    assert await at(eight - 1) == ["chat-0", "nightly"]
    for i in range(4):
        site.world.start(f"more-{i}")
    assert await at(eight) == [*day, "nightly"]
    assert not site.stored.groups


LEND_TWO = Desired(
    groups={name: Group("chat", 2, 2) for name in "abc"},
    schedules=(replace(DESIRED.schedules[0], num_groups=2),),
)


def lent(site: Site) -> list[str]:
    return [g.group_id for g in site.stored.groups if g.pool]


@pytest.mark.fault("F12")
@pytest.mark.req("S11", "S21")
async def test_a_new_leader_continues_the_scheduled_moves_of_the_old_one() -> None:
    """The schedule will not fire again. So the rest of the plan is stored with the time for which
    the schedule fired.
    """
    site = Site(LEND_TWO, num=12)
    site.settle()
    await site.loop.round()
    site.wall = NIGHT + 1
    await site.loop.round()
    assert lent(site) == ["c"]
    site.elect()
    await site.loop.round()
    assert lent(site) == ["c"], "one move at a time, whichever master leads"
    site.settle()
    await site.loop.round()
    assert lent(site) == ["b", "c"]
    site.elect()
    site.settle()
    await site.loop.round()
    assert lent(site) == ["b", "c"]
    assert not site.stored.pending, "the plan is done"
    site.elect()
    await site.loop.round()
    assert lent(site) == ["b", "c"]


async def test_a_plan_without_a_leader_for_hours_ends_with_the_move_under_way() -> None:
    site = Site(LEND_TWO, num=12)
    site.settle()
    await site.loop.round()
    site.wall = NIGHT + 1
    await site.loop.round()
    site.elect()
    site.wall += RESUME_WITHIN_S + 1
    site.settle()
    await site.loop.round()
    assert (lent(site), list(site.stored.pending)) == (["c"], [])


async def test_a_plan_of_a_later_release_is_left_out() -> None:
    site = Site(LEND_TWO, num=12)
    site.settle()
    await site.loop.round()
    site.stored.pending.add(scenario="chat", is_moving=True).moves.add(
        group_id="c", kind="teleport"
    )
    site.elect()
    await site.loop.round()
    assert (lent(site), list(site.stored.pending)) == ([], [])


async def test_without_a_desired_state_nothing_is_planned() -> None:
    site = Site(Desired(), num=2)
    await site.loop.round()
    assert not site.stored.groups


@pytest.mark.req("S29")
@pytest.mark.parametrize("has_auto_ratio", [True, False])
async def test_longer_prompts_turn_a_decode_into_a_prefill_if_the_ratio_is_auto(
    has_auto_ratio: bool,
) -> None:
    scenarios = {"chat": Scenario(has_auto_ratio=has_auto_ratio)}
    site = Site(Desired(scenarios=scenarios, groups={"a": Group("chat", 3, 3)}), num=6)
    site.settle()

    async def windows(count: int, t_p_s: float) -> None:
        for _ in range(count):
            for _ in range(100):
                site.windows.finished(
                    RequestSample("chat", 900, 0, 50, 0.0, t_p_s, t_p_s + 1.0, 0.01)
                )
            site.world.now += 31
            await site.loop.round()

    await windows(10, t_p_s=0.2)
    assert not site.stored.groups
    site.used = {Role.PREFILL: 7, Role.DECODE: 2}
    site.settle()
    await windows(10, t_p_s=0.8)
    changed = [(g.num_prefill, g.num_decode) for g in site.stored.groups]
    assert changed == ([(4, 2)] if has_auto_ratio else [])


async def test_a_window_in_which_an_instance_was_lost_says_nothing_of_the_ratio(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The window is useless even if a substitute serves before its end.

    Each decision is logged with the loads of the groups and the moves.
    """
    scenarios = {"chat": Scenario(has_auto_ratio=True)}
    site = Site(Desired(scenarios=scenarios, groups={"a": Group("chat", 3, 3)}), num=7)
    site.settle()

    async def windows(count: int, t_p_s: float, *, is_lost: bool = False) -> None:
        for _ in range(count):
            for _ in range(100):
                site.windows.finished(
                    RequestSample("chat", 900, 0, 50, 0.0, t_p_s, t_p_s + 1.0, 0.01)
                )
            if is_lost:
                lost = site.world.ready("a", Role.PREFILL)[0]
                site.world.kill(lost)
                site.world.round()
                await site.loop.round()
                site.world.start(lost)
                site.settle()
            site.world.now += 31
            await site.loop.round()

    await windows(10, t_p_s=0.2)
    site.used = {Role.PREFILL: 7, Role.DECODE: 2}
    site.settle()
    await windows(10, t_p_s=0.8, is_lost=True)
    assert not site.stored.groups
    logs = capture_logs_of(move_loop, monkeypatch)
    await windows(10, t_p_s=0.8)
    assert [(g.num_prefill, g.num_decode) for g in site.stored.groups] == [(4, 2)]
    (planned,) = [e for e in logs if e["event"] == "ratio.decided" and e["action"] == "planned"]
    assert planned["moves"] == ["a change_role prefill"]
    (group,) = planned["groups"]
    assert (group["num_prefill"], group["num_decode"]) == (3, 3)
    assert group["prefill_busy"] > group["decode_busy"]


@pytest.mark.req("S29", "S41")
async def test_a_prefill_becomes_a_decode_though_waiting_prompts_hold_all_prefill_slots() -> None:
    """Prompts keep their slots until a decode has their KV. By slots in use, no prefill could be
    spared. By compute, one can.
    """
    scenarios = {"chat": Scenario(has_auto_ratio=True)}
    site = Site(Desired(scenarios=scenarios, groups={"a": Group("chat", 3, 3)}), num=6)
    site.settle()

    async def windows(count: int, t_d_s: float) -> None:
        for _ in range(count):
            for _ in range(100):
                site.windows.finished(
                    RequestSample("chat", 900, 0, 50, 0.0, 0.5, 0.5 + t_d_s, 0.01)
                )
            for name in site.world.ready("a", Role.PREFILL):
                computed = [PrefillComputed("r", 900, 0, 9.0)]
                site.fleet.handle(LoadReported(name, 1, 8, 8, 1000, False, (), computed), 0.0)
            site.world.now += 31
            await site.loop.round()

    await windows(10, t_d_s=2.0)
    assert not site.stored.groups
    site.used = {Role.PREFILL: 8, Role.DECODE: 7}
    site.settle()
    await windows(6, t_d_s=4.0)
    assert [(g.num_prefill, g.num_decode) for g in site.stored.groups] == [(2, 4)]
