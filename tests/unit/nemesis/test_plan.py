"""The nemesis's plan of faults.

A seed repeats the plan, and the plan has every kind of fault. No step goes beyond what the mesh
promises to survive.
"""

from __future__ import annotations

import itertools

import pytest

from pdmesh.desired_file import read
from tests.chaos.nemesis.actions import Apply, Cordon, Outage, Rollback, Signal, Uncordon
from tests.chaos.nemesis.plan import (
    FIRST,
    GATEWAYS,
    INSTANCES,
    LINKED,
    MASTERS,
    MAX_FAULTS,
    MAX_INSTANCES_HIT,
    Step,
    steps,
)

SEEDS = range(20)


def plan(seed: int, num: int = 60) -> list[Step]:
    return list(itertools.islice(steps(seed), num))


def test_a_seed_determines_the_plan() -> None:
    assert plan(7) == plan(7)
    assert plan(7) != plan(8)


@pytest.mark.fault("F42")
@pytest.mark.parametrize("seed", SEEDS)
def test_no_step_goes_beyond_its_limits(seed: int) -> None:
    cordoned: str | None = None
    for step in plan(seed):
        targets = [fault.target for fault in step.faults]
        assert 1 <= len(targets) <= MAX_FAULTS
        assert len(set(targets)) == len(targets)
        assert len(set(targets) & set(INSTANCES)) <= MAX_INSTANCES_HIT
        assert len(set(targets) & set(GATEWAYS)) <= 1
        if any(isinstance(f, Outage) and f.is_wiped for f in step.faults):
            assert not set(targets) & set(MASTERS)
        for _, action in step.actions:
            match action:
                case Cordon(target):
                    assert cordoned is None
                    cordoned = target
                case Uncordon(target):
                    assert cordoned == target
                    cordoned = None
                case Rollback():
                    assert cordoned is None
        assert cordoned not in targets


def test_an_applied_state_is_valid_and_leaves_room_for_a_new_release() -> None:
    texts = {FIRST} | {
        action.text
        for seed in SEEDS
        for step in plan(seed)
        for _, action in step.actions
        if isinstance(action, Apply)
    }
    for text in texts:
        groups = read(text).groups.values()
        assert 2 * sum(g.prefill + g.decode + g.fusion for g in groups) <= len(INSTANCES)


def test_a_short_run_has_every_kind_of_fault() -> None:
    """A run of two minutes has more than ten steps, which draw from a bag of all faults."""
    kinds = {(type(f), f.target.rstrip("-0123456789")) for step in plan(1, 14) for f in step.faults}
    assert {kind.__name__ for kind, _ in kinds} == {
        "Signal", "Freeze", "Outage", "Cut", "Slow", "DeviceFault",
    }  # fmt: skip
    assert len(kinds) > 10
    armed = [f for f in itertools.chain(*(s.faults for s in plan(1))) if isinstance(f, Signal)]
    assert any(signal.armed for signal in armed)
    assert set(LINKED) >= set(MASTERS)
