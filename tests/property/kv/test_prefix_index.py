"""The prefix index against brute force, with reordered and lost deltas, snapshots and restarts."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdmesh.core.kv.prefix.prefix_index import DeltaOutcome, IndexDelta, PrefixIndex

BLOCKS = [bytes([i]) * 16 for i in range(12)]
INSTANCES = ["p0", "p1", "p2"]
blocks = st.lists(st.sampled_from(BLOCKS), max_size=4)
change = st.tuples(st.sampled_from(INSTANCES), st.booleans(), blocks, blocks)


class Worker:
    """The blocks that an instance really has, and the deltas that it published."""

    def __init__(self, name: str, incarnation: int) -> None:
        self.name, self.incarnation = name, incarnation
        self.cache: set[bytes] = set()
        self.deltas: list[IndexDelta] = []

    def change(self, is_cleared: bool, removed: list[bytes], stored: list[bytes]) -> None:
        if is_cleared:
            self.cache.clear()
        self.cache -= set(removed)
        self.cache |= set(stored)
        sequence = len(self.deltas) + 1
        self.deltas.append(
            IndexDelta(
                self.name, self.incarnation, sequence, tuple(removed), tuple(stored), is_cleared
            )
        )


def contiguous(cache: set[bytes], hashes: list[bytes]) -> int:
    length = 0
    while length < len(hashes) and hashes[length] in cache:
        length += 1
    return length


def assert_equals_truth(index: PrefixIndex, workers: list[Worker], rng: random.Random) -> None:
    index.check_invariants()
    for worker in workers:
        assert index.blocks(worker.name) == worker.cache
    for _ in range(5):
        prompt = rng.sample(BLOCKS, rng.randint(0, len(BLOCKS)))
        truth = {w.name: n for w in workers if (n := contiguous(w.cache, prompt))}
        assert index.match(prompt) == truth


def make_workers(changes: list[tuple[str, bool, list[bytes], list[bytes]]]) -> list[Worker]:
    workers = {name: Worker(name, 7) for name in INSTANCES}
    for name, is_cleared, removed, stored in changes:
        workers[name].change(is_cleared, removed, stored)
    return list(workers.values())


@pytest.mark.req("S98", "S102")
@pytest.mark.fault("F22")
@given(st.lists(change, max_size=30), st.randoms(use_true_random=False))
def test_deltas_in_any_order_with_repetitions_converge(
    changes: list[tuple[str, bool, list[bytes], list[bytes]]], rng: random.Random
) -> None:
    workers, index = make_workers(changes), PrefixIndex()
    stream = [delta for worker in workers for delta in worker.deltas * 2]
    rng.shuffle(stream)
    for delta in stream:
        index.apply(delta)
        index.check_invariants()
    assert_equals_truth(index, workers, rng)
    assert all(index.is_whole(w.name) for w in workers if w.deltas)


@pytest.mark.req("S101")
@pytest.mark.fault("F22")
@settings(max_examples=200, deadline=None)
@given(st.lists(change, max_size=30), st.randoms(use_true_random=False))
def test_lost_deltas_are_detected_and_a_snapshot_repairs_the_index(
    changes: list[tuple[str, bool, list[bytes], list[bytes]]], rng: random.Random
) -> None:
    """Deltas from before the snapshot and from after it arrive in any order."""
    workers, index = make_workers(changes), PrefixIndex()
    for worker in workers:
        moment = rng.randint(0, len(worker.deltas))
        at_moment = Worker(worker.name, 7)
        for delta in worker.deltas[:moment]:
            at_moment.change(delta.is_cleared, list(delta.removed), list(delta.stored))
        late = worker.deltas[moment:]
        early = [d for d in worker.deltas[:moment] if rng.random() < 0.5]
        before = [d for d in late if rng.random() < 0.5]
        after = [d for d in late if d not in before]
        for delta in rng.sample(early + before, len(early + before)):
            index.apply(delta)
        index.load_snapshot(worker.name, 7, moment, at_moment.cache)
        for delta in rng.sample(after, len(after)):
            index.apply(delta)
    assert_equals_truth(index, workers, rng)


@pytest.mark.fault("F5")
@given(st.lists(change, min_size=1, max_size=20), st.randoms(use_true_random=False))
def test_late_deltas_of_an_earlier_incarnation_change_nothing(
    changes: list[tuple[str, bool, list[bytes], list[bytes]]], rng: random.Random
) -> None:
    old, index = make_workers(changes), PrefixIndex()
    for worker in old:
        for delta in worker.deltas:
            index.apply(delta)
    new = [Worker(name, 8) for name in INSTANCES]
    for worker in new:
        worker.change(False, [], rng.sample(BLOCKS, 3))
    for worker in new:
        assert index.apply(worker.deltas[0]) is DeltaOutcome.APPLIED
    for worker in old:
        for delta in worker.deltas:
            assert index.apply(delta) is DeltaOutcome.STALE
        late_snapshot = index.load_snapshot(worker.name, 7, 99, BLOCKS)
        assert late_snapshot is (DeltaOutcome.STALE if worker.deltas else DeltaOutcome.APPLIED)
        # The index does not know incarnation 7, so it cannot tell which incarnation is newer.
        if not worker.deltas:
            index.remove_instance(worker.name)
            index.apply(
                IndexDelta(worker.name, 8, 1, (), tuple(new[INSTANCES.index(worker.name)].cache))
            )
            new[INSTANCES.index(worker.name)].cache = set(index.blocks(worker.name))
    assert_equals_truth(index, new, rng)
