"""The verdict on a ratio move: whether the move did harm, and how long the next one must wait."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdmesh.core.model import Role
from pdmesh.core.moves.move import Move, MoveKind
from pdmesh.core.ratio.bottleneck import Window
from pdmesh.core.ratio.verdict import Cooldown, MoveTrial, Verdict, VerdictLimits

P, D = Role.PREFILL, Role.DECODE
CALM = Window(100, 0.0, 0.5, 2.0, 1.0, 0.4, 0.6)
FULL = replace(CALM, queue_s=2.0, answered_per_s=10.0)
LIMITS = VerdictLimits()


def trial(before: Window = CALM) -> MoveTrial:
    move = Move("g0", MoveKind.CHANGE_ROLE, D)
    return MoveTrial(move, D, (before,) * 3, rate_per_s=10.0, limits=LIMITS)


def verdict(before: Window, after: Window, rate_per_s: float = 10.0) -> Verdict:
    judged = trial(before)
    early = [judged.judge(after, rate_per_s) for _ in range(LIMITS.num_windows - 1)]
    assert early == [None] * len(early)
    found = judged.judge(after, rate_per_s)
    assert found is not None
    return found


@pytest.mark.req("S28")
def test_a_move_is_undone_for_harm_that_was_measured() -> None:
    slower = replace(CALM, t_d_s=2.5)
    assert verdict(CALM, CALM) == Verdict("", "E2E 2.5 -> 2.5 s")
    assert verdict(CALM, slower).harm == "E2E rose from 2.5 to 3 s"
    assert verdict(CALM, replace(CALM, success_share=0.9)).harm == (
        "success fell from 100.0% to 90.0%"
    )


@pytest.mark.req("S28")
@pytest.mark.parametrize(
    ("pace", "harm"), [(9.0, "answers fell from 10 to 9 per s"), (9.8, ""), (12.0, "")]
)
def test_while_requests_wait_only_the_pace_of_answers_counts(pace: float, harm: str) -> None:
    """More requests arrive than are answered, so E2E time and success get worse, even if the move
    helps.
    """
    worse = replace(FULL, queue_s=20.0, success_share=0.5, answered_per_s=pace)
    assert verdict(FULL, worse).harm == harm


@pytest.mark.req("S28")
def test_slower_answers_do_not_count_as_harm_under_more_load() -> None:
    slower = replace(CALM, t_d_s=5.0)
    assert verdict(CALM, slower, rate_per_s=20.0).harm == ""
    assert verdict(CALM, slower, rate_per_s=10.5).harm


def test_windows_before_another_plan_ended_do_not_count() -> None:
    judged = trial()
    for _ in range(LIMITS.num_windows - 1):
        judged.judge(replace(CALM, t_d_s=9.0), 10.0)
    judged.restart()
    found = [judged.judge(CALM, 10.0) for _ in range(LIMITS.num_windows)]
    assert found == [None, None, Verdict("", "E2E 2.5 -> 2.5 s")]


@pytest.mark.req("S28")
def test_the_wait_after_a_harmful_move_doubles_up_to_a_bound() -> None:
    cooldown, now = Cooldown(first_s=100.0, max_s=300.0), 0.0
    for wait_s in (100.0, 200.0, 300.0, 300.0):
        cooldown.failed(D, now)
        assert cooldown.covers(D, now + wait_s - 1)
        assert not cooldown.covers(P, now)
        assert not cooldown.covers(D, now + wait_s)
        now += wait_s


@pytest.mark.req("S28")
def test_the_wait_grows_while_moves_alternate_between_roles_until_a_calm_time() -> None:
    cooldown = Cooldown(first_s=100.0, max_s=300.0)
    cooldown.kept(D, now=0.0)
    assert cooldown.covers(P, 99.0)
    assert not cooldown.covers(D, 0.0)
    cooldown.kept(P, now=100.0)
    assert cooldown.covers(D, 299.0)
    cooldown.kept(P, now=300.0)  # the same role again, so the roles do not alternate
    assert not cooldown.covers(D, 400.0)
    cooldown.kept(D, now=400.0 + 301.0)
    assert not cooldown.covers(P, 801.0)
