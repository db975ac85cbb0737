"""The fault judge: a proof decides at once, and a suspicion needs a quorum that lasts (S33, S34).

Caps and a panic hold ejections back. Some facts outlive the incarnation of an instance.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pdmesh.core.health.ejection_cap import CAP, PANIC
from pdmesh.core.health.fault_judge import (
    CRASH_LOOP,
    RESTARTED_IN_VAIN,
    FaultJudge,
    Healed,
    InstanceGone,
    InstanceSeen,
    Judged,
    Signal,
    SignalsHeard,
    SignalsLost,
    SignalsRestored,
)
from pdmesh.core.health.fault_levels import FaultAction, Level
from pdmesh.core.model import Tick

pytestmark = pytest.mark.req("S34")
HANGS = Signal("engine", "ENGINE_SILENT", Level.PROCESS, is_proof=True)
LOST = Signal("device", "DEVICE_LOST", Level.LOST, is_proof=True)
CANARY = Signal("canary", "CANARY_FAILED", Level.PROCESS)
ERRORS = Signal("errors", "LEGS_FAIL", Level.PROCESS)
FOREVER_S = 1e9


@pytest.fixture
def judge() -> Iterator[FaultJudge]:
    judge = FaultJudge()
    yield judge
    judge.check_invariants()


def seen(judge: FaultJudge, *ids: str, role: str = "decode", at: float = 0.0, n: int = 1) -> None:
    for instance_id in ids:
        judge.handle(InstanceSeen(instance_id, n, "g", role, "node-a"), at)


def tell(
    judge: FaultJudge,
    instance_id: str,
    *signals: Signal,
    at: float = 0.0,
    ttl_s: float = FOREVER_S,
    incarnation: int = 1,
) -> None:
    for source in {s.source for s in signals} or {"engine", "device", "canary", "errors"}:
        mine = tuple(s for s in signals if s.source == source)
        judge.handle(SignalsHeard(source, instance_id, incarnation, mine, ttl_s), at)


def tick(judge: FaultJudge, at: float) -> list[Judged]:
    return judge.handle(Tick(), at)


def levels(judged: list[Judged]) -> dict[str, tuple[Level, str]]:
    return {j.instance_id: (j.level, j.held_back) for j in judged}


def test_a_healthy_instance_gets_no_verdict(judge: FaultJudge) -> None:
    seen(judge, "d0", "d1")
    assert tick(judge, 1.0) == []
    assert judge.current() == []


def test_a_proof_decides_at_once(judge: FaultJudge) -> None:
    seen(judge, "d0", "d1")
    tell(judge, "d0", HANGS)
    (judged,) = tick(judge, 0.1)
    assert (judged.level, judged.action, judged.held_back) == (
        Level.PROCESS,
        FaultAction.RESTART_PROCESS,
        "",
    )
    assert judged.signals == (HANGS,)
    assert judged.node_id == "node-a"
    assert tick(judge, 0.2) == []
    assert judge.current() == [judged]


def test_a_lone_suspicion_ejects_no_instance(judge: FaultJudge) -> None:
    seen(judge, "d0", "d1")
    tell(judge, "d0", CANARY)
    assert levels(tick(judge, 0.0)) == {"d0": (Level.TRANSIENT, "")}
    assert tick(judge, 60.0) == []


def test_two_sources_that_agree_for_a_while_decide(judge: FaultJudge) -> None:
    seen(judge, "d0", "d1")
    tell(judge, "d0", CANARY, ERRORS)
    assert tick(judge, 0.0) == []
    assert levels(tick(judge, 2.5)) == {"d0": (Level.PROCESS, "")}


def test_two_signals_of_one_source_are_one_suspicion(judge: FaultJudge) -> None:
    seen(judge, "d0", "d1")
    tell(judge, "d0", CANARY, Signal("canary", "CANARY_WRONG", Level.PROCESS))
    tick(judge, 0.0)
    assert judge.current()[0].level is Level.TRANSIENT
    assert tick(judge, 30.0) == []


def test_the_level_is_the_worst_that_a_quorum_supports(judge: FaultJudge) -> None:
    """One source reports a node fault, and the other one a process fault. Both agree that at least
    the process is faulty.
    """
    seen(judge, "d0", "d1")
    tell(judge, "d0", CANARY, Signal("device", "DEVICE_HOT", Level.NODE))
    tick(judge, 0.0)
    tick(judge, 3.0)
    assert judge.current()[0].level is Level.PROCESS


def test_a_judgement_stays_until_nothing_speaks_for_it_for_a_while(judge: FaultJudge) -> None:
    seen(judge, "d0", "d1")
    tell(judge, "d0", HANGS)
    tick(judge, 0.0)
    tell(judge, "d0", at=1.0)
    assert tick(judge, 1.0) == []
    tell(judge, "d0", HANGS, at=8.0)
    assert tick(judge, 8.0) == []
    tell(judge, "d0", at=9.0)
    assert tick(judge, 9.0) == []
    assert levels(tick(judge, 19.5)) == {"d0": (Level.WELL, "")}
    assert judge.current() == []


def test_a_flapping_suspicion_never_lasts_long_enough_to_count(judge: FaultJudge) -> None:
    seen(judge, "d0", "d1")
    for i in range(50):
        tell(judge, "d0", *((CANARY, ERRORS) if i % 2 else (CANARY,)), at=float(i))
        judge.handle(SignalsHeard("errors", "d0", 1, (ERRORS,) if i % 2 else (), 9.0), float(i))
        tick(judge, float(i))
        assert all(j.level <= Level.TRANSIENT for j in judge.current())


def test_a_signal_that_is_not_repeated_becomes_void(judge: FaultJudge) -> None:
    seen(judge, "d0", "d1")
    tell(judge, "d0", HANGS, ttl_s=3.0)
    tick(judge, 0.0)
    assert tick(judge, 4.0) == []
    assert levels(tick(judge, 14.5)) == {"d0": (Level.WELL, "")}


@pytest.mark.fault("F18")
def test_while_nothing_can_be_heard_no_instance_is_judged(judge: FaultJudge) -> None:
    seen(judge, "d0", "d1")
    tell(judge, "d0", HANGS, ttl_s=3.0)
    tick(judge, 0.0)
    judge.handle(SignalsLost(), 1.0)
    assert tick(judge, 100.0) == []
    judge.handle(SignalsRestored(), 101.0)
    assert tick(judge, 105.0) == []
    assert judge.current()[0].level is Level.PROCESS


@pytest.mark.fault("F35")
def test_a_fault_level_holds_for_one_incarnation(judge: FaultJudge) -> None:
    seen(judge, "d0", "d1")
    tell(judge, "d0", HANGS)
    tick(judge, 0.0)
    seen(judge, "d0", n=2, at=1.0)
    assert tick(judge, 1.0) == []
    assert judge.current() == []
    tell(judge, "d0", HANGS, at=1.1, incarnation=1)
    assert tick(judge, 1.2) == []


def test_an_instance_that_restarts_counts_as_out(judge: FaultJudge) -> None:
    """Otherwise a wrong judgement would restart a whole group, one instance after the other."""
    seen(judge, "d0", "d1", "d2")
    tell(judge, "d0", HANGS)
    tick(judge, 0.0)
    judge.handle(InstanceGone("d0", is_crash=False), 1.0)
    tell(judge, "d1", HANGS, at=2.0)
    assert levels(tick(judge, 2.0)) == {"d1": (Level.PROCESS, CAP)}
    seen(judge, "d0", at=3.0, n=2)
    assert tick(judge, 3.0) == []
    assert levels(tick(judge, 61.0)) == {"d1": (Level.PROCESS, "")}


def test_instances_that_were_out_before_a_panic_stay_out(judge: FaultJudge) -> None:
    """The faults of these instances were proven while the other instances were well. So requests to
    them would certainly fail. A panic once put such instances back into service.
    """
    for group in range(5):
        judge.handle(InstanceSeen(f"d{group}", 1, f"g{group}", "decode"), 0.0)
    tell(judge, "d0", LOST)
    assert levels(tick(judge, 0.0)) == {"d0": (Level.LOST, "")}
    for group in (1, 2, 3):
        tell(judge, f"d{group}", LOST, at=1.0)
    assert levels(tick(judge, 1.0)) == {f"d{group}": (Level.LOST, PANIC) for group in (1, 2, 3)}
    assert ("d0", "") in [(j.instance_id, j.held_back) for j in judge.current()]
    tell(judge, "d0", at=2.0)
    tick(judge, 2.0)
    for at in (13.0, 80.0):
        tick(judge, at)
    # d0 was well in between, and now fails together with the others
    tell(judge, "d0", LOST, at=100.0)
    assert levels(tick(judge, 100.0)) == {"d0": (Level.LOST, PANIC)}


@pytest.mark.req("S36", "S74")
def test_an_uncordoned_instance_is_judged_only_by_new_reports(
    judge: FaultJudge,
) -> None:
    seen(judge, "d1")
    for n in range(1, 4):
        seen(judge, "d0", n=n, at=n * 70.0)
        tell(judge, "d0", HANGS, incarnation=n, at=n * 70.0)
        tick(judge, n * 70.0)
        judge.handle(InstanceGone("d0", is_crash=False), n * 70.0 + 1)
    seen(judge, "d0", n=4, at=281.0)
    assert levels(tick(judge, 281.0)) == {"d0": (Level.INSTANCE, "")}
    judge.handle(Healed("d0"), 282.0)
    assert levels(tick(judge, 282.0)) == {"d0": (Level.WELL, "")}
    assert tick(judge, 400.0) == []
    tell(judge, "d0", LOST, incarnation=4, at=401.0)
    tick(judge, 401.0)
    judge.handle(Healed("d0"), 402.0)
    (again,) = tick(judge, 402.0)  # the device of d0 still reports the fault
    assert (again.level, again.since) == (Level.LOST, 402.0)


@pytest.mark.req("S74")
def test_restarts_that_do_not_help_are_followed_by_a_replacement(judge: FaultJudge) -> None:
    seen(judge, "d1")
    for n in range(1, 4):
        at = n * 70.0
        seen(judge, "d0", n=n, at=at)
        tell(judge, "d0", HANGS, incarnation=n, at=at)
        assert levels(tick(judge, at)) == {"d0": (Level.PROCESS, "")}
        judge.handle(InstanceGone("d0", is_crash=False), at + 1)
    seen(judge, "d0", n=4, at=281.0)
    (judged,) = tick(judge, 281.0)
    assert (judged.level, judged.action) == (Level.INSTANCE, FaultAction.REPLACE_INSTANCE)
    assert judged.signals[0].reason == RESTARTED_IN_VAIN


@pytest.mark.fault("F37")
def test_a_crash_loop_is_a_suspicion_and_ends_with_a_stable_life(judge: FaultJudge) -> None:
    seen(judge, "d1")
    for n in range(1, 7):
        seen(judge, "d0", n=n, at=float(n))
    (judged,) = tick(judge, 7.0)
    assert judged.level is Level.TRANSIENT
    assert judged.signals[0].reason == CRASH_LOOP
    tell(judge, "d0", CANARY, at=8.0, incarnation=6)
    tick(judge, 8.0)
    tick(judge, 11.0)
    assert judge.current()[0].signals[0].reason == CRASH_LOOP
    tick(judge, 40.0)
    tell(judge, "d0", at=40.0, incarnation=6)
    tick(judge, 40.0)
    tick(judge, 60.0)
    assert judge.current() == []
