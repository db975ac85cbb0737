"""The detector of bottlenecks looks for the paper's two signs and ignores everything else."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace

import pytest

from pdmesh.core.model import Role
from pdmesh.core.ratio.bottleneck import (
    BottleneckDetector,
    DetectorLimits,
    Finding,
    Window,
)

CALM = Window(100, 0.0, 0.5, 2.0, prefill_busy=0.5, decode_busy=0.5)
P, D = Role.PREFILL, Role.DECODE


def feed(detector: BottleneckDetector, windows: Iterable[Window]) -> list[Finding]:
    return [found for w in windows if (found := detector.handle(w)) is not None]


def learnt(window: Window = CALM) -> BottleneckDetector:
    detector = BottleneckDetector()
    assert feed(detector, [window] * detector.limits.num_reference) == []
    assert detector.reference is not None
    return detector


@pytest.mark.req("S29")
@pytest.mark.parametrize(
    ("changed", "short_of"),
    [
        (replace(CALM, t_d_s=3.0), D),  # outputs are half as long again
        (replace(CALM, t_p_s=1.2), P),  # prompts are longer
        (replace(CALM, queue_s=1.0), P),  # no prefill is idle, so requests wait at the gateway
        # prompts keep their slots, because no decode is free
        (replace(CALM, queue_s=1.0, t_d_s=2.5, decode_busy=0.99), D),
        (replace(CALM, t_p_s=0.65, t_d_s=2.6), None),  # both phases are slower by the same factor
    ],
)  # fmt: skip
def test_e2e_and_the_share_of_prefill_tell_which_role_is_short(
    changed: Window, short_of: Role | None
) -> None:
    detector = learnt()
    found = feed(detector, [changed] * detector.limits.num_windows)
    assert [f.short_of for f in found] == [short_of]
    assert "E2E 2.5 ->" in found[0].reason


@pytest.mark.req("S29")
def test_a_change_shorter_than_the_windows_that_must_agree_says_nothing() -> None:
    detector = learnt()
    slow = replace(CALM, t_d_s=3.5)
    assert feed(detector, [slow, slow, CALM] * 20) == []


@pytest.mark.req("S29")
@pytest.mark.parametrize("seed", range(20))
def test_an_hour_of_noise_finds_nothing(seed: int) -> None:
    """Each window lasts 10 s. Its two mean times vary independently by 7 % (one sigma)."""
    rng = random.Random(seed)
    noisy = [
        replace(CALM, t_p_s=0.5 * rng.gauss(1, 0.07), t_d_s=2.0 * rng.gauss(1, 0.07))
        for _ in range(360)
    ]
    assert feed(BottleneckDetector(), noisy) == []


@pytest.mark.req("S29")
def test_slow_growth_is_not_absorbed() -> None:
    windows = [replace(CALM, t_d_s=2.0 * 1.005**i) for i in range(80)]
    assert {f.short_of for f in feed(learnt(), windows)} == {D}


def test_a_window_with_few_requests_neither_confirms_nor_denies() -> None:
    detector = learnt()
    slow, silent = replace(CALM, t_d_s=3.5), replace(CALM, num_requests=3)
    assert len(feed(detector, [slow, silent, slow, silent, slow])) == 1


def test_a_lasting_improvement_becomes_the_reference() -> None:
    """Answers are faster at night. In the morning they are slower than at night, but not slower
    than the evening before.
    """
    detector = learnt(replace(CALM, t_d_s=4.0))
    limits = detector.limits
    assert feed(detector, [CALM] * (limits.num_windows + limits.num_reference)) == []
    assert detector.reference is not None
    assert detector.reference.e2e_s == pytest.approx(CALM.e2e_s)
    assert feed(detector, [replace(CALM, t_d_s=3.0)] * 3)


@pytest.mark.req("S32")
def test_a_role_that_is_saturated_from_the_start_is_found_without_a_rise() -> None:
    wrong = replace(CALM, prefill_busy=0.3, decode_busy=1.0)
    found = feed(BottleneckDetector(), [wrong] * 3)
    assert [f.short_of for f in found] == [D]
    assert feed(BottleneckDetector(), [replace(wrong, prefill_busy=0.9)] * 3) == []


@pytest.mark.req("S28")
def test_an_unknown_load_is_no_sign_of_anything() -> None:
    blind = replace(CALM, prefill_busy=None, decode_busy=1.0)
    assert feed(BottleneckDetector(DetectorLimits()), [blind] * 30) == []
