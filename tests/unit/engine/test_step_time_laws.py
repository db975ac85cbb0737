from itertools import pairwise

import pytest

from pdmesh.core.instance.step_time_law import Law
from pdmesh.engine.step_time_laws import DEMO, LAWS, SMOLLM2_CPU, ZERO


def test_the_zero_law_takes_no_time() -> None:
    assert ZERO.prefill_s(4096) == ZERO.step_s(64, 100_000) == 0.0


def test_nothing_to_compute_takes_no_time() -> None:
    for law in LAWS.values():
        assert law.prefill_s(0) == law.step_s(0, 0) == 0.0


@pytest.mark.parametrize("law", [DEMO, SMOLLM2_CPU])
def test_more_work_never_takes_less_time(law: Law) -> None:
    for small, large in pairwise((1, 16, 64, 512, 2048)):
        assert law.prefill_s(small) < law.prefill_s(large)
        assert law.step_s(small, 0) < law.step_s(large, 0)


def test_the_cpu_law_is_what_was_measured() -> None:
    assert 512 / SMOLLM2_CPU.prefill_s(512) == pytest.approx(2500, rel=0.1)
    assert 1 / SMOLLM2_CPU.step_s(1, 512) == pytest.approx(26, rel=0.1)
    assert 8 / SMOLLM2_CPU.step_s(8, 8 * 512) == pytest.approx(185, rel=0.1)


def test_a_prompt_attends_to_what_was_cached_before_it() -> None:
    assert SMOLLM2_CPU.prefill_s(512, num_cached=2048) > SMOLLM2_CPU.prefill_s(512)
