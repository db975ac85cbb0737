"""Tests whether an engine schedules a step while it computes the step before.

Each decision has a reason.
"""

from __future__ import annotations

import itertools

import pytest

from pdmesh.core.instance.async_scheduling import AsyncScheduling, Schedules, decide

DECODE = Schedules("cuda")
FLAGS = (False, True)
ENGINES = [
    Schedules(device, *facts, num_stages=num_stages)
    for device in ("cpu", "cuda")
    for facts in itertools.product(FLAGS, FLAGS, FLAGS, FLAGS)
    for num_stages in (1, 2)
]


@pytest.mark.req("S145")
def test_off_is_off_on_every_engine() -> None:
    assert not any(decide(AsyncScheduling.OFF, engine).is_async for engine in ENGINES)


@pytest.mark.req("S149", "S150")
@pytest.mark.parametrize("asked", [AsyncScheduling.AUTO, AsyncScheduling.ON])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_an_engine_that_pools_proposes_tokens_or_reads_images_never_schedules_ahead(
    asked: AsyncScheduling, device: str
) -> None:
    pooling = decide(asked, Schedules(device, is_pooling=True))
    assert (pooling.is_async, pooling.reason) == (
        False,
        "an input of a pooling model takes one step",
    )
    assert not decide(asked, Schedules(device, proposes_tokens=True)).is_async
    assert not decide(asked, Schedules(device, reads_images=True)).is_async


@pytest.mark.req("S120", "S149")
@pytest.mark.parametrize("asked", [AsyncScheduling.AUTO, AsyncScheduling.ON])
def test_a_pipeline_has_steps_under_way_anyhow(asked: AsyncScheduling) -> None:
    decision = decide(asked, Schedules("cuda", num_stages=2))
    assert not decision.is_async
    assert "pipeline" in decision.reason


@pytest.mark.req("S149")
def test_a_prefill_schedules_ahead_only_if_it_is_told_to() -> None:
    prefill = Schedules("cuda", hands_on_all=True)
    assert not decide(AsyncScheduling.AUTO, prefill).is_async
    assert decide(AsyncScheduling.ON, prefill).is_async


def test_auto_is_on_for_answers_on_a_device_beside_the_cpu() -> None:
    assert decide(AsyncScheduling.AUTO, DECODE).is_async
    assert decide(AsyncScheduling.ON, DECODE).is_async


def test_every_decision_has_a_reason() -> None:
    assert all(decide(asked, engine).reason for asked in AsyncScheduling for engine in ENGINES)
