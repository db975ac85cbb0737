"""The flight recorder keeps the last events of a state machine and their effects.

An internal error shows these events. Their number and length are bounded.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from pdmesh.core.flight_recorder import FlightRecorder, IllegalEvent, recorded
from pdmesh.errors import NoInstance


@dataclass(frozen=True, slots=True)
class Said:
    number: int
    secret: str = field(default="hidden", repr=False)


@dataclass(slots=True)
class Machine:
    recorder: FlightRecorder = field(default_factory=FlightRecorder)

    @recorded
    def handle(self, event: Said, now: float) -> list[str]:
        if event.number < 0:
            raise NoInstance("an answer, not a bug")
        if event.number == 0:
            raise IllegalEvent("nothing was said")
        return ["x" * event.number] if event.number < 5000 else []


def broken(machine: Machine) -> list[str]:
    with pytest.raises(IllegalEvent) as raised:
        machine.handle(Said(0), 9.0)
    return raised.value.__notes__[0].splitlines()[1:]


def test_an_error_carries_the_last_events_with_their_effects() -> None:
    machine = Machine()
    assert machine.handle(Said(2), 1.5) == ["xx"]
    assert broken(machine) == ["1.500 Said(number=2) -> ['xx']", "9.000 Said(number=0) -> raised"]


def test_a_recorder_is_bounded_in_steps_and_in_length() -> None:
    machine = Machine()
    for number in range(1, 2000):
        machine.handle(Said(number), 0.0)
    lines = broken(machine)
    assert len(lines) == 16
    assert max(map(len, lines)) < 600
    assert "hidden" not in "".join(lines), "the recorder hides fields that no log may show"


def test_events_without_effects_push_out_no_others() -> None:
    machine = Machine()
    machine.handle(Said(3), 0.0)
    for now in range(100):
        assert machine.handle(Said(5000), float(now)) == []
    assert [line.split()[0] for line in broken(machine)] == ["0.000", "99.000", "9.000"]


def test_an_expected_error_carries_no_events() -> None:
    with pytest.raises(NoInstance) as raised:
        Machine().handle(Said(-1), 0.0)
    assert not hasattr(raised.value, "__notes__")
