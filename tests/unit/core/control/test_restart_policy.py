"""The restart policy decides when a process that died is started again."""

from __future__ import annotations

import pytest

from pdmesh.core.control.restart_policy import (
    BecameReady,
    Exited,
    GiveUp,
    ProcessPhase,
    RestartPolicy,
    RestartScheduled,
    SignalStop,
    StartAsked,
    StartProcess,
    StopAsked,
    Supervision,
)
from pdmesh.core.model import Tick

KILLED = -9


def started(policy: RestartPolicy | None = None) -> Supervision:
    supervision = Supervision(policy or RestartPolicy())
    assert supervision.handle(StartAsked("decode-0"), now=0.0) == [StartProcess("decode-0")]
    return supervision


@pytest.mark.req("S74")
def test_the_first_death_is_followed_by_an_immediate_restart() -> None:
    supervision = started()
    assert supervision.handle(Exited("decode-0", KILLED), now=1.0) == [
        RestartScheduled("decode-0", KILLED, deaths=1, delay_s=0.0),
        StartProcess("decode-0"),
    ]


@pytest.mark.req("S74")
def test_each_further_death_waits_twice_as_long_up_to_the_limit() -> None:
    policy = RestartPolicy(base_delay_s=0.25, max_delay_s=5.0)
    assert [policy.delay_s(n) for n in range(1, 9)] == [0, 0.25, 0.5, 1, 2, 4, 5, 5]
    assert policy.delay_s(10_000) == 5.0


def test_a_waiting_process_starts_when_its_time_has_come_and_not_before() -> None:
    supervision = started()
    supervision.handle(Exited("decode-0", 1), now=1.0)
    supervision.handle(Exited("decode-0", 1), now=1.1)
    assert supervision.phase("decode-0") is ProcessPhase.WAITING
    assert supervision.next_start_at() == pytest.approx(1.35)
    assert supervision.handle(Tick(), now=1.3) == []
    assert supervision.handle(Tick(), now=1.36) == [StartProcess("decode-0")]
    assert supervision.next_start_at() is None


def test_a_process_that_was_ready_for_a_while_starts_over_with_an_immediate_restart() -> None:
    supervision = started()
    supervision.handle(Exited("decode-0", 1), now=1.0)
    supervision.handle(Exited("decode-0", 1), now=1.1)
    supervision.handle(Tick(), now=2.0)
    supervision.handle(BecameReady("decode-0"), now=3.0)
    supervision.handle(BecameReady("decode-0"), now=12.0)  # a repeated report changes nothing
    effects = supervision.handle(Exited("decode-0", 1), now=13.0)
    assert effects[0] == RestartScheduled("decode-0", 1, deaths=1, delay_s=0.0)


def test_a_process_that_takes_long_to_die_before_it_is_ready_is_in_a_crash_loop() -> None:
    """This failed once with a model whose load fails after 12 s: 200 deaths were followed by 201
    starts without a delay.
    """
    supervision, policy, now = started(), RestartPolicy(), 0.0
    for deaths in range(1, policy.max_deaths):
        now += 12.0
        (scheduled, *_) = supervision.handle(Exited("decode-0", 1), now)
        delay_s = policy.delay_s(deaths)
        assert scheduled == RestartScheduled("decode-0", 1, deaths, delay_s)
        now += delay_s
        supervision.handle(Tick(), now)
        assert supervision.phase("decode-0") is ProcessPhase.RUNNING
    assert supervision.handle(Exited("decode-0", 1), now + 12.0) == [
        GiveUp("decode-0", 1, policy.max_deaths)
    ]


def test_readiness_is_that_of_the_process_that_runs_now() -> None:
    supervision = started()
    supervision.handle(BecameReady("decode-0"), now=1.0)
    supervision.handle(Exited("decode-0", 1), now=2.0)
    assert not supervision.is_ready("decode-0")
    effects = supervision.handle(Exited("decode-0", 1), now=20.0)
    assert effects == [RestartScheduled("decode-0", 1, deaths=2, delay_s=0.25)]
    supervision.handle(BecameReady("decode-0"), now=20.1)  # too late: the process has already died
    assert not supervision.is_ready("decode-0")


def test_a_process_that_waits_long_for_others_is_in_no_crash_loop() -> None:
    supervision = started()
    supervision.handle(Exited("decode-0", KILLED), now=1.0)
    effects = supervision.handle(Exited("decode-0", KILLED), now=700.0)
    assert effects[0] == RestartScheduled("decode-0", KILLED, deaths=1, delay_s=0.0)


def test_a_crash_loop_is_given_up_once_and_stays_so() -> None:
    supervision = started(RestartPolicy(max_deaths=3))
    supervision.handle(Exited("decode-0", 1), now=0.1)
    supervision.handle(Exited("decode-0", 1), now=0.2)
    supervision.handle(Tick(), now=1.0)
    assert supervision.handle(Exited("decode-0", 1), now=1.1) == [GiveUp("decode-0", 1, 3)]
    assert supervision.handle(Tick(), now=99.0) == []
    assert supervision.phase("decode-0") is ProcessPhase.FAILED


def test_a_bad_setting_is_given_up_at_once() -> None:
    assert started().handle(Exited("decode-0", 2), now=0.1) == [GiveUp("decode-0", 2, 1)]


def test_a_process_that_was_asked_to_stop_is_not_restarted() -> None:
    supervision = started()
    assert supervision.handle(StopAsked("decode-0"), now=1.0) == [SignalStop("decode-0")]
    assert supervision.handle(StopAsked("decode-0"), now=1.1) == []
    assert supervision.handle(Exited("decode-0", 0), now=2.0) == []
    assert supervision.phase("decode-0") is ProcessPhase.STOPPED


def test_a_stop_while_waiting_cancels_the_restart() -> None:
    supervision = started()
    supervision.handle(Exited("decode-0", 1), now=0.1)
    supervision.handle(Exited("decode-0", 1), now=0.2)
    assert supervision.handle(StopAsked("decode-0"), now=0.3) == []
    assert supervision.handle(Tick(), now=9.0) == []


def test_an_operator_may_start_again_what_was_given_up() -> None:
    supervision = started()
    supervision.handle(Exited("decode-0", 2), now=0.1)
    assert supervision.handle(StartAsked("decode-0"), now=5.0) == [StartProcess("decode-0")]
    assert supervision.deaths("decode-0") == 0


def test_starts_of_running_processes_and_exits_of_unknown_ones_change_nothing() -> None:
    supervision = started()
    assert supervision.handle(StartAsked("decode-0"), now=1.0) == []
    assert supervision.handle(Exited("nobody", 1), now=1.0) == []
    assert supervision.handle(StopAsked("nobody"), now=1.0) == []
