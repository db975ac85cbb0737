"""The load of each role over a window, from the reports of instances."""

from __future__ import annotations

import pytest

from pdmesh.core.model import Role
from pdmesh.core.placement.fleet import (
    Fleet,
    InstanceRecorded,
    LoadReported,
    PrefillComputed,
)
from pdmesh.core.placement.instance import Identity
from pdmesh.core.ratio.role_loads import RoleLoads

P, D = Role.PREFILL, Role.DECODE


def fleet() -> Fleet:
    found = Fleet()
    for name, role in (("p0", P), ("p1", P), ("d0", D)):
        found.handle(
            InstanceRecorded(Identity(name, 1, role, "g", "chat", "m", "f", 64, 4, 100, 0)), 0.0
        )
    return found


def report(found: Fleet, name: str, used: int, free: int = 100, computed_s: float = 0.0) -> None:
    computed = [PrefillComputed("r", 1000, 0, computed_s)] if computed_s else []
    found.handle(LoadReported(name, 1, 4, used, free, False, (), computed), 1.0)


def sample(found: Fleet, loads: RoleLoads, start: int, until: int) -> None:
    for second in range(start, until):
        loads.sample(found.instances.values(), float(second))


@pytest.mark.req("S41")
def test_a_prefill_is_busy_while_it_computes_not_while_its_prompts_wait_for_a_decode() -> None:
    found, loads = fleet(), RoleLoads()
    for name in ("p0", "p1"):
        report(found, name, used=0)
    report(found, "d0", used=1, free=10)
    sample(found, loads, 0, 1)
    for name in ("p0", "p1"):
        report(found, name, used=4, computed_s=3.0)
    sample(found, loads, 1, 11)
    loads.close()
    assert loads.busy(["g"], P) == pytest.approx(0.3)
    # the share of KV memory in use, since a tenth is free
    assert loads.busy(["g"], D) == pytest.approx(0.9)


@pytest.mark.req("S28")
def test_an_instance_that_never_reported_makes_the_load_of_its_role_unknown() -> None:
    found, loads = fleet(), RoleLoads()
    report(found, "p0", used=1)
    report(found, "d0", used=1)
    sample(found, loads, 0, 10)
    assert loads.busy(["g"], P) is None
    assert loads.busy(["g"], D) == pytest.approx(0.25)  # from the window that is still open
    assert loads.busy(["nobody"], P) is None


def test_a_window_keeps_nothing_of_the_window_before() -> None:
    found, loads = fleet(), RoleLoads()
    report(found, "d0", used=4)
    sample(found, loads, 0, 10)
    loads.close()
    report(found, "d0", used=0)
    sample(found, loads, 10, 20)
    assert loads.busy(["g"], D) == 1.0
    loads.close()
    assert loads.busy(["g"], D) == 0.0
