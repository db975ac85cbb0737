from hypothesis import given
from hypothesis import strategies as st

from pdmesh.engine.base import BlocksChanged
from pdmesh.instance.legs.publishing import BlockDelta

hashes = st.lists(st.sampled_from([bytes([n]) * 16 for n in range(6)]), max_size=3)
changes = st.builds(
    BlocksChanged,
    stored=hashes.map(tuple),
    removed=hashes.map(tuple),
    is_cleared=st.sampled_from([False, False, False, True]),
)


def apply(change: BlocksChanged, known: set[bytes]) -> None:
    if change.is_cleared:
        known.clear()
    known.difference_update(change.removed)
    known.update(change.stored)


@given(st.sets(st.sampled_from([bytes([n]) * 16 for n in range(6)])), st.lists(changes, max_size=8))
def test_a_merged_delta_equals_its_changes_one_by_one(
    known: set[bytes], sequence: list[BlocksChanged]
) -> None:
    expected, delta, published = set(known), BlockDelta(), dict.fromkeys(known)
    for change in sequence:
        apply(change, expected)
        delta.add(change)
    delta.apply_to(published)
    assert set(published) == expected
    together = BlocksChanged(tuple(delta.stored), tuple(delta.removed), delta.is_cleared)
    apply(together, known)
    assert known == expected
