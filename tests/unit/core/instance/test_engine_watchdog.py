"""The watchdog ends an instance whose engine hangs. A slow or paused engine is left alone."""

from __future__ import annotations

import pytest

from pdmesh.core.instance.engine_watchdog import (
    ENGINE_SILENT,
    ENGINE_SLOW,
    DeclareHung,
    EngineWatchdog,
    PingAnswered,
    SendPing,
    WorkSeen,
)
from pdmesh.core.model import Tick

pytestmark = pytest.mark.req("S33")


def watch() -> EngineWatchdog:
    return EngineWatchdog(slow_s=4.0, hung_s=20.0)


def test_only_one_ping_is_pending_at_a_time() -> None:
    engine = watch()
    assert engine.handle(Tick(), 0.0) == [SendPing()]
    assert engine.handle(Tick(), 1.0) == []
    assert engine.handle(PingAnswered(), 1.5) == []
    assert engine.silent_s(1.5) == 0.0
    assert engine.handle(Tick(), 2.0) == [SendPing()]


def test_silence_is_first_a_suspicion_then_a_proof_then_the_end_of_the_engine() -> None:
    engine = watch()
    effects = [(now, e) for now in range(22) for e in engine.handle(Tick(), float(now))]
    assert effects == [(0, SendPing()), (20, DeclareHung(20.0)), (21, DeclareHung(21.0))]
    engine = watch()
    engine.handle(Tick(), 0.0)
    assert engine.signal(3.9) is None
    slow, silent = engine.signal(4.0), engine.signal(20.0)
    assert slow is not None
    assert silent is not None
    assert (slow.reason, slow.is_proof) == (ENGINE_SLOW, False)
    assert (silent.reason, silent.is_proof) == (ENGINE_SILENT, True)


def test_a_long_step_does_not_count_as_silence_while_layers_are_computed() -> None:
    """The engine answers pings only between two steps, so a step of 100 s leaves a ping unanswered
    for 100 s.
    """
    engine = watch()
    for now in range(101):
        engine.handle(WorkSeen(), float(now))
        assert not [e for e in engine.handle(Tick(), float(now)) if isinstance(e, DeclareHung)]
        assert engine.signal(float(now)) is None
    effects = [(now, e) for now in range(101, 121) for e in engine.handle(Tick(), float(now))]
    assert effects == [(120, DeclareHung(20.0))], "it stopped within that step"


def test_work_before_a_ping_does_not_answer_it() -> None:
    engine = watch()
    engine.handle(WorkSeen(), 0.0)
    assert engine.handle(Tick(), 0.0) == [SendPing()]
    assert engine.silent_s(7.0) == 7.0


def test_a_long_step_ends_and_nothing_is_held_against_the_engine() -> None:
    engine = watch()
    for now in range(19):
        engine.handle(Tick(), float(now))
    engine.handle(PingAnswered(), 18.5)
    assert engine.signal(18.5) is None
    assert engine.handle(Tick(), 19.0) == [SendPing()]


@pytest.mark.fault("F4")
def test_a_paused_sequence_waits_again() -> None:
    engine = watch()
    engine.handle(Tick(), 0.0)
    engine.handle(Tick(), 1.0)
    assert engine.handle(Tick(), 60.0) == []
    assert engine.silent_s(60.0) == 0.0
    for now in range(61, 80):
        assert engine.handle(Tick(), float(now)) == []
    assert engine.handle(Tick(), 80.0) == [DeclareHung(20.0)]
