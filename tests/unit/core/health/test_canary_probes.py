"""Tests which instance the canary probe tries next, and how its failures are judged (S34).

A canary probe is a small request that the health-monitor sends to an idle instance.
"""

from __future__ import annotations

import pytest

from pdmesh.core.health.canary_probes import (
    CANARY_FAILED,
    CanaryProbe,
    CanaryRota,
    ProbeTarget,
)
from pdmesh.core.model import Role

pytestmark = pytest.mark.req("S34")


def subject(name: str, role: Role, cell: str = "c", incarnation: int = 1) -> ProbeTarget:
    return ProbeTarget(name, incarnation, role, cell)


P0, P1 = (subject(f"p{i}", Role.PREFILL) for i in (0, 1))
D0, D1 = (subject(f"d{i}", Role.DECODE) for i in (0, 1))
ALL = [P0, P1, D0, D1]


def rota() -> CanaryRota:
    """A rota that saw all instances at time 0."""
    rota = CanaryRota(period_s=30.0)
    assert rota.next(ALL, 0.0) is None, "no instance is tried the moment it appears"
    return rota


def test_each_idle_instance_is_tried_once_a_period_and_partners_change() -> None:
    canary = rota()
    probes = [canary.next(ALL, 30.0 + i) for i in range(4)]
    assert {s for p in probes if p for s in p.subjects} == set(ALL)
    assert probes[2:] == [None, None]
    assert canary.next([P0], 45.0) is None
    again = [canary.next(ALL, 70.0 + i) for i in range(2)]
    assert not {p for p in again if p} & {p for p in probes if p}, "other pairs than before"
    assert canary.next([P1, D0], 110.0) == CanaryProbe(P1, D0)


def test_an_instance_without_a_partner_is_probed_alone() -> None:
    canary = CanaryRota(period_s=1.0)
    fusion, far = subject("f0", Role.FUSION), subject("d9", Role.DECODE, cell="far")
    for each in (fusion, far, P0):
        assert canary.next([each], 0.0) is None
    assert canary.next([fusion], 2.0) == CanaryProbe(fusion, None)
    assert canary.next([P0, far], 2.0) == CanaryProbe(far, None)
    assert canary.next([], 9.0) is None


def test_two_failures_are_a_suspicion_and_one_pass_clears_it() -> None:
    canary = rota()
    canary.ended(CanaryProbe(P0, D0), [P0, D0], "TimeoutError", 1.0)
    assert canary.signals(P0) == canary.signals(D0) == ()
    canary.ended(CanaryProbe(P1, D0), [P1, D0], "KV_TRANSFER_FAILED", 2.0)
    canary.ended(CanaryProbe(P0, D1), [], "", 3.0)
    canary.ended(CanaryProbe(P1, D1), [], "", 4.0)
    (signal,) = canary.signals(D0)
    assert (signal.reason, signal.is_proof) == (CANARY_FAILED, False)
    assert signal.detail == "KV_TRANSFER_FAILED"
    assert canary.signals(P0) == canary.signals(P1) == ()
    canary.ended(CanaryProbe(P0, D0), [], "", 5.0)
    assert canary.signals(D0) == ()


def test_a_failed_prefill_says_nothing_of_the_decode() -> None:
    canary = rota()
    for _ in range(2):
        canary.ended(CanaryProbe(P0, D0), [P0], "ENGINE_DIED", 1.0)
    assert canary.signals(P0)
    assert canary.signals(D0) == ()


@pytest.mark.fault("F35")
def test_a_new_incarnation_has_no_strikes() -> None:
    canary = rota()
    for _ in range(2):
        canary.ended(CanaryProbe(P0, None), [P0], "x", 1.0)
    assert canary.signals(subject("p0", Role.PREFILL, incarnation=2)) == ()
    assert canary.next([subject("p0", Role.PREFILL, incarnation=2)], 40.0) is None
    canary.forget("p0")
    assert canary.signals(P0) == ()
