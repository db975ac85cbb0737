"""An operator or a profile changes the ratio of prefills to decodes.

As with the monitor, the plan consists of single moves that are checked, and its decisions are
shown.
"""

from __future__ import annotations

import pytest

from pdmesh.cli import app
from pdmesh.cli.commands.ratio import decisions_text
from pdmesh.core.groups.adjustments import CannotMove
from pdmesh.core.groups.desired import Desired, Group
from pdmesh.core.model import Role
from pdmesh.core.moves.move import (
    Move,
    MoveKind,
    MovePlan,
    Trigger,
)
from pdmesh.core.ratio.throughput import Profile
from pdmesh.errors import InvalidRequest
from pdmesh.v1 import admin_service_pb2 as pb
from tests.support.sites.master_site import Site as AdminSite
from tests.unit.master_scheduler.plans.test_move_loop import DESIRED, Site


@pytest.mark.req("S27", "S28")
async def test_the_move_of_an_operator_is_checked_at_once_then_made_and_shown_until_its_end() -> (
    None
):
    site = Site(DESIRED, num=8)
    site.settle()
    await site.loop.round()
    move = Move("a", MoveKind.CHANGE_ROLE, Role.PREFILL, reason="by hand")
    plan = MovePlan("chat", Trigger.OPERATOR, (move,), "by hand")
    (told,) = site.loop.ask(plan, site.world.epoch)
    assert (told.action, told.reason, told.moves[0].kind) == ("planned", "by hand", "change_role")
    await site.loop.round()
    assert [(g.group_id, g.num_prefill, g.num_decode) for g in site.stored.groups] == [("a", 3, 1)]
    for _ in range(2):
        site.settle()
        await site.loop.round()
    assert site.world.counts()["a"] == (3, 1, 0)
    assert [(d.action, d.reason) for d in site.loop.decisions] == [
        ("planned", "by hand"),
        ("ended", "operator plan done: 1 of 1 moves"),
    ]


@pytest.mark.req("S27", "S28", "S31")
@pytest.mark.parametrize(
    ("move", "scenario", "why"),
    [
        (Move("x", MoveKind.ADD, Role.DECODE), "chat", "there is no group x"),
        (Move("a", MoveKind.ADD, Role.DECODE), "chat", "no blank instance"),
        (Move("a", MoveKind.ADD, Role.DECODE), "other", "serves scenario other"),
        (Move("a", MoveKind.REMOVE, Role.DECODE), "chat", "1 decode of a would be 200% busy"),
    ],
)
async def test_a_move_that_may_not_be_made_is_refused_before_anything_begins(
    move: Move, scenario: str, why: str
) -> None:
    site = Site(DESIRED, num=8)
    site.used[Role.DECODE] = 8
    site.settle()
    for _ in range(2):
        site.world.now += 1
        await site.loop.round()
    with pytest.raises(CannotMove, match=why):
        site.loop.ask(MovePlan(scenario, Trigger.OPERATOR, (move,), ""), site.world.epoch)
    assert not site.loop.decisions


@pytest.mark.req("S27")
async def test_a_move_to_a_group_of_another_scenario_is_refused_with_the_name_of_that_group() -> (
    None
):
    site = Site(Desired(groups={"a": Group("chat", 2, 2), "b": Group("code", 2, 2)}), num=8)
    site.settle()
    await site.loop.round()
    move = Move("a", MoveKind.MOVE, Role.DECODE, to_group="b")
    plan = MovePlan("chat", Trigger.OPERATOR, (move,), "", is_forced=True)
    with pytest.raises(CannotMove, match="group b belongs to another scenario"):
        site.loop.ask(plan, site.world.epoch)


@pytest.mark.req("S27", "S30")
async def test_a_profile_plans_every_group_towards_its_best_split() -> None:
    site = Site(DESIRED, num=8)
    site.settle()
    await site.loop.round()
    (told,) = site.loop.profiled("chat", Profile(t_p=3.0, b_p=1, t_d=1.0, b_d=1), 1)
    assert [(m.group_id, m.kind, m.role) for m in told.moves] == [
        ("a", "change_role", "prefill"),
        ("b", "change_role", "prefill"),
    ]
    assert "b_p/T_p 0.333/s, b_d/T_d 1/s" in told.reason
    assert [g.num_prefill for g in told.groups] == [2, 2]
    with pytest.raises(CannotMove, match="has not examined"):
        # The site has not seen this epoch.
        site.loop.profiled("chat", Profile(1.0, 1, 1.0, 1), 2)


@pytest.mark.req("S27")
@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (pb.PlanMovesRequest(), "moves"),
        (pb.PlanMovesRequest(profile=pb.ScenarioProfile(t_p_s=1.0)), "profile.num_prefill_slots"),
        (pb.PlanMovesRequest(moves=[pb.PendingMove(kind="add", role="decode")] * 257), "moves"),
        (pb.PlanMovesRequest(moves=[pb.PendingMove(kind="fly")]), "moves[0]"),
        (pb.PlanMovesRequest(moves=[pb.PendingMove(kind="add")]), "moves[0]"),
        (pb.PlanMovesRequest(moves=[pb.PendingMove(kind="lend")]), "moves[0]"),
        (pb.PlanMovesRequest(moves=[pb.PendingMove(kind="move", role="decode")]), "moves[0]"),
        (pb.PlanMovesRequest(moves=[pb.PendingMove(kind="add", role="decode")]), "scenario"),
    ],
)
async def test_an_invalid_request_for_moves_names_the_error(
    request_: pb.PlanMovesRequest, field: str
) -> None:
    site = AdminSite()
    await site.start()
    with pytest.raises(InvalidRequest) as caught:
        await site.ask("PlanMoves", request_)
    assert caught.value.field == field
    await site.close()


def test_decisions_are_reported_with_their_numbers_and_moves() -> None:
    group = pb.GroupLoad(group_id="chat", num_prefill=2, num_decode=1, prefill_busy=0.9)
    move = pb.PendingMove(group_id="chat", kind="change_role", role="prefill")
    decided = pb.RatioDecision(
        scenario="chat", action="planned", reason="more prefills", moves=[move],
        e2e_s=1.25, prefill_share=0.42, groups=[group],
    )  # fmt: skip
    decided.decided_at.FromSeconds(3600)
    assert decisions_text([decided]).splitlines() == [
        "01:00:00 chat: planned: more prefills",
        (
            "         E2E 1.25 s, T_p/E2E 42.0%; chat 2P:1D, prefills 90% busy, decodes of "
            "unknown load"
        ),
        "         chat: change_role prefill",
    ]
    assert decisions_text([]) == "this leader has made no decision yet"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--more", "decode"], "choose a group"),
        (["--force"], "choose a change"),
        (["--more", "decode", "--add", "decode"], "not allowed with argument"),
        (["--profile", "1", "2", "3"], "expected 4 arguments"),
        (["--profile", "1", "2", "nan", "4"], "must be a positive number"),
    ],
)
def test_a_missing_argument_is_reported_before_any_master_is_called(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        app.main(["ratio", "chat", *arguments])
    assert exit_info.value.code == 2
    assert says in capsys.readouterr().err
