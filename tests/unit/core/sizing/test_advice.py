"""Tests whether separate prefills and decodes pay, decided by ranges of device counts, with
reasons.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from loadtests.sizing.scenes import SCENES
from pdmesh.core.sizing.advice import GpuRange, PlanAnswer, advise, answer_of
from pdmesh.core.sizing.search import NotPossible
from pdmesh.core.sizing.traffic import Goals

STRICT = next(scene for scene in SCENES if scene.name == "long prompts (strict)")


@pytest.mark.parametrize(
    ("pair", "fusion", "answer"),
    [
        (GpuRange(4, 6), GpuRange(7, 9), PlanAnswer.PAYS),
        (GpuRange(7, 9), GpuRange(4, 6), PlanAnswer.FUSION),
        (GpuRange(4, 6), GpuRange(6, 8), PlanAnswer.EQUAL),
        (GpuRange(4, 6), None, PlanAnswer.ONLY_PAIR),
        (None, GpuRange(4, 6), PlanAnswer.ONLY_FUSION),
        (None, None, PlanAnswer.NEITHER),
    ],
)
def test_ranges_decide(pair: GpuRange | None, fusion: GpuRange | None, answer: PlanAnswer) -> None:
    assert answer_of(pair, fusion) is answer


def test_long_prompts_beside_a_strict_tpot_pay_for_pd() -> None:
    advice = advise(STRICT.wanted(20.0), error=0.1)
    assert advice.answer in (PlanAnswer.PAYS, PlanAnswer.ONLY_PAIR)
    assert advice.chosen is advice.pair
    assert any("prefills compute" in reason for reason in advice.reasons)


def test_a_light_load_is_cheaper_on_fusion_for_two_of_each_role() -> None:
    advice = advise(SCENES[0].wanted(2.0, least=2))
    assert advice.answer is PlanAnswer.FUSION
    assert advice.chosen is advice.fusion
    assert any("--least" in reason for reason in advice.reasons)


def test_what_cannot_be_is_a_reason() -> None:
    wanted = replace(SCENES[0].wanted(2.0), goals=Goals(1.0, 1e-6))
    advice = advise(wanted)
    assert advice.answer is PlanAnswer.NEITHER
    assert advice.chosen is None
    assert isinstance(advice.pair, NotPossible)
    assert len(advice.reasons) == 2


def test_a_larger_error_widens_the_ranges() -> None:
    sure, unsure = (advise(SCENES[0].wanted(300.0), error=e) for e in (0.01, 0.4))
    for one, other in ((sure.pair_range, unsure.pair_range),
                       (sure.fusion_range, unsure.fusion_range)):  # fmt: skip
        assert one is not None
        assert other is not None
        assert other.low <= one.low <= one.high <= other.high
        assert other.high > other.low
    assert str(GpuRange(3, 3)) == "3"
    assert str(GpuRange(3, 4)) == "3 to 4"
