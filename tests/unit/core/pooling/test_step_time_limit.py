"""A long step that cannot be divided counts as work for a time that depends on its tokens.

After that time, the engine gives no more signs of work.
"""

from __future__ import annotations

from pdmesh.core.pooling.step_time_limit import StepTimeLimit


def silent_from(limit: StepTimeLimit, num_open_tokens: int, start: float = 0.0) -> float:
    """Seconds until the last sign of work, if the step never ends."""
    times = [start + second for second in range(1000)]
    signs = [limit.num_signs(3, num_open_tokens, now) for now in times]
    assert signs == sorted(signs)
    return next(t for t, count in zip(times, signs, strict=True) if count == signs[-1]) - start


def test_a_step_with_more_tokens_has_more_time() -> None:
    assert silent_from(StepTimeLimit(4096, 512, 30.0), 512) == 0
    assert silent_from(StepTimeLimit(4096, 512, 30.0), 1024) == 30
    assert silent_from(StepTimeLimit(4096, 512, 30.0), 4096) == 7 * 30


def test_more_inputs_than_a_step_takes_give_it_no_more_time() -> None:
    assert silent_from(StepTimeLimit(1024, 512, 30.0), 100_000) == 30


def test_an_idle_engine_gives_no_signs() -> None:
    limit = StepTimeLimit(4096, 512, 30.0)
    assert {limit.num_signs(5, 0, float(now)) for now in range(100)} == {5}


def test_each_step_has_its_own_time_and_signs_are_never_taken_back() -> None:
    limit = StepTimeLimit(1024, 512, 30.0)
    assert silent_from(limit, 1024) == 30
    before = limit.num_signs(3, 1024, 1000.0)
    after = limit.num_signs(4, 1024, 1000.0)
    assert after == before + 1
    assert limit.num_signs(4, 1024, 1010.0) == after + 10
