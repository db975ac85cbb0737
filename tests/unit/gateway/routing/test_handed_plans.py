"""A plan that an endpoint picker hands to a gateway is used once, in time, and only for its own
request.
"""

from __future__ import annotations

import base64
import hmac

import pytest

from pdmesh.services.gateway.routing.handed_plans import LIFE_S, HandedPlans
from pdmesh.v1.scheduler_service_pb2 import Candidate, HandedPlan, PlanResult


class Clock:
    now = 1e9

    def __call__(self) -> float:
        return self.now


def plans(clock: Clock, secret: bytes = b"secret") -> HandedPlans:
    return HandedPlans(secret, clock)


def plan(request_id: str = "req-1") -> HandedPlan:
    result = PlanResult(request_id=request_id, prefills=[Candidate(instance_id="p0")])
    return HandedPlan(result=result, prompt_digest=b"d" * 16, model="m", scenario="chat")


def test_another_gateway_of_the_mesh_takes_it_once() -> None:
    clock = Clock()
    header, gateway = plans(clock).issue(plan()), plans(clock)
    taken = gateway.take(header)
    assert taken is not None
    assert taken.result == plan().result
    assert gateway.take(header) is None


def test_a_plan_of_another_mesh_or_of_nobody_is_ignored() -> None:
    clock = Clock()
    header = plans(clock, b"another").issue(plan())
    for wrong in (header, "", "x", "é", "A" * 9000, base64.urlsafe_b64encode(b"abc").decode()):
        assert plans(clock).take(wrong) is None


@pytest.mark.parametrize("at", range(0, 60, 7))
def test_a_changed_byte_makes_it_void(at: int) -> None:
    clock = Clock()
    data = bytearray(base64.urlsafe_b64decode(plans(clock).issue(plan())))
    data[at] ^= 1
    assert plans(clock).take(base64.urlsafe_b64encode(data).decode()) is None


def test_the_hash_secret_signs_no_plan_itself() -> None:
    """The secret has other uses, whose signatures must not be valid for a plan."""
    clock = Clock()
    made = plan()
    plans(clock).issue(made)
    payload = made.SerializeToString()
    forged = base64.urlsafe_b64encode(payload + hmac.digest(b"secret", payload, "sha256"))
    assert plans(clock).take(forged.decode()) is None


@pytest.mark.parametrize(
    ("late_s", "is_taken"),
    [(0, True), (LIFE_S + 4, True), (LIFE_S + 6, False), (-4, True), (-6, False)],
)
def test_it_ends_after_some_seconds_and_clocks_may_differ(late_s: float, is_taken: bool) -> None:
    clock = Clock()
    header = plans(clock).issue(plan())
    clock.now += late_s
    assert (plans(clock).take(header) is not None) is is_taken


def test_used_plans_are_remembered_until_they_would_expire_anyway() -> None:
    clock = Clock()
    gateway = plans(clock)
    for number in range(1000):
        clock.now += 1
        assert gateway.take(plans(clock).issue(plan(f"req-{number}"))) is not None
    assert len(gateway._used) < 2 * LIFE_S + 10


@pytest.mark.parametrize(
    "other",
    [
        HandedPlan(prompt_digest=b"e" * 16, model="m", scenario="chat"),
        HandedPlan(prompt_digest=b"d" * 16, model="n", scenario="chat"),
        HandedPlan(prompt_digest=b"d" * 16, model="m", scenario=""),
        HandedPlan(prompt_digest=b"d" * 16, model="m", scenario="chat", adapter_digest="a"),
        HandedPlan(prompt_digest=b"d" * 16, model="m", scenario="chat", max_tokens=9),
    ],
)
def test_it_fits_only_its_own_request(other: HandedPlan) -> None:
    gateway = plans(Clock())
    made = plan()
    gateway.issue(made)
    assert gateway.fits(made, HandedPlan(prompt_digest=b"d" * 16, model="m", scenario="chat"))
    assert not gateway.fits(made, other)


def test_a_body_that_comes_after_the_plans_end_is_planned_anew() -> None:
    clock = Clock()
    gateway, made = plans(clock), plan()
    taken = gateway.take(gateway.issue(made))
    assert taken is not None
    clock.now += 2 * LIFE_S
    assert not gateway.fits(taken, made)


@pytest.mark.parametrize("request_id", ["", "req-1\r\nset-cookie: a=b", "req-" + "1" * 65, "x"])
def test_an_id_that_no_picker_gives_is_not_taken_over(request_id: str) -> None:
    gateway = plans(Clock())
    assert gateway.take(gateway.issue(plan(request_id))) is None
