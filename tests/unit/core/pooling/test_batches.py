from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdmesh.core.pooling.batches import MAX_BATCH_INPUTS, MAX_BATCH_TOKENS, batches


@given(st.lists(st.integers(1, 3 * MAX_BATCH_TOKENS), max_size=200))
def test_each_input_is_in_one_batch_in_order_and_within_the_bounds(lengths: list[int]) -> None:
    found = list(batches(lengths))
    assert [place for batch in found for place in batch] == list(range(len(lengths)))
    for batch in found:
        assert 1 <= len(batch) <= MAX_BATCH_INPUTS
        assert len(batch) == 1 or sum(lengths[i] for i in batch) <= MAX_BATCH_TOKENS


def test_a_few_short_inputs_share_a_batch() -> None:
    assert list(batches([5] * MAX_BATCH_INPUTS)) == [range(MAX_BATCH_INPUTS)]
