"""The place of a rank in a pipeline.

A stage's ranks have the same layers, and exchange KV only with ranks of the same stage.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh.core.kv.layout.rank_place import RankPlace

STAGES = st.sampled_from([(), (2, 2), (1, 2), (3, 1, 2)])
BESIDE = st.sampled_from([1, 2, 4])


@pytest.mark.req("S120")
@given(STAGES, BESIDE, BESIDE)
def test_ranks_are_numbered_stage_by_stage_as_vllm_numbers_them(
    stages: tuple[int, ...], ours: int, theirs: int
) -> None:
    num_stages = max(1, len(stages))
    places = [RankPlace(rank, ours * num_stages, stages) for rank in range(ours * num_stages)]
    assert [(p.stage, p.rank_in_stage) for p in places] == [
        (stage, rank) for stage in range(num_stages) for rank in range(ours)
    ]
    assert [p.rank for p in places if p.is_first_to_draw] == [(num_stages - 1) * ours]
    for place in places:
        num_theirs = theirs * num_stages
        first = place.first_of(num_theirs)
        met = range(first, first + place.num_beside_of(num_theirs))
        assert {RankPlace(rank, num_theirs, stages).stage for rank in met} == {place.stage}
        assert len(met) == theirs


@pytest.mark.req("S120")
def test_ranks_that_do_not_fill_the_stages_are_refused() -> None:
    with pytest.raises(ValueError, match="3 ranks do not divide over 2 stages"):
        RankPlace(0, 3, (2, 2))
    with pytest.raises(IndexError, match="no rank 4 of 4"):
        RankPlace(4, 4, (2, 2))
    for stages in ((2,), (2, 0)):
        with pytest.raises(ValueError, match="stages of"):
            RankPlace(0, 2, stages)
    place = RankPlace(1, 2, (2, 2))
    for num_theirs in (0, 3):
        with pytest.raises(ValueError, match=f"{num_theirs} ranks do not divide"):
            place.first_of(num_theirs)
