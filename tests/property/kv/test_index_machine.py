"""A copy of the prefix index under lost, repeated and reordered messages, and restarts (S101).

The index knows which KV blocks each instance has. Instances publish deltas and snapshots.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdmesh.core.kv.prefix.prefix_index import (
    TIERS,
    DeltaOutcome,
    IndexDelta,
    PrefixIndex,
    SnapshotLoad,
    TierDelta,
)
from pdmesh.core.kv.tier import Tier

BLOCKS = [bytes([i]) * 16 for i in range(8)]
NAMES = ["p0", "p1", "p2"]
names = st.sampled_from(NAMES)
some = st.lists(st.sampled_from(BLOCKS), max_size=4)


class Worker:
    """The blocks of one instance, and the numbers of its messages."""

    def __init__(self, name: str, incarnation: int) -> None:
        self.name, self.incarnation, self.sequence = name, incarnation, 0
        self.held: dict[Tier, set[bytes]] = {tier: set() for tier in TIERS}


class IndexMachine(RuleBasedStateMachine):
    """`bag` has the deltas in flight, which arrive in any order. Deltas left in it are lost."""

    def __init__(self) -> None:
        super().__init__()
        self.workers = {name: Worker(name, 1) for name in NAMES}
        self.bag: list[IndexDelta] = []
        self.snapshots: list[tuple[str, int, int, frozenset[bytes], frozenset[bytes]]] = []
        self.copy = PrefixIndex()
        self.loads: list[SnapshotLoad] = []

    @rule(name=names, removed=some, stored=some, host=st.booleans(), clears=st.booleans())
    def worker_changes(
        self, name: str, removed: list[bytes], stored: list[bytes], host: bool, clears: bool
    ) -> None:
        worker = self.workers[name]
        held = worker.held[Tier.HOST if host else Tier.ENGINE]
        if clears:
            held.clear()
        held -= set(removed)
        held |= set(stored)
        worker.sequence += 1
        part = TierDelta(removed, stored, clears)
        number = (name, worker.incarnation, worker.sequence)
        self.bag.append(
            IndexDelta(*number, host=part) if host else IndexDelta(*number, removed, stored, clears)
        )

    @precondition(lambda self: self.bag)
    @rule(which=st.integers(0, 1000), keeps=st.booleans())
    def delta_arrives(self, which: int, keeps: bool) -> None:
        """Deliver a delta. With `keeps`, the delta stays in the bag and can arrive again."""
        position = which % len(self.bag)
        delta = self.bag[position] if keeps else self.bag.pop(position)
        if self._is_present(delta.instance_id, delta.incarnation):
            self.copy.apply(delta)

    @rule(name=names)
    def snapshot_is_taken(self, name: str) -> None:
        worker = self.workers[name]
        held = (frozenset(worker.held[Tier.ENGINE]), frozenset(worker.held[Tier.HOST]))
        self.snapshots.append((name, worker.incarnation, worker.sequence, *held))

    @precondition(lambda self: self.snapshots)
    @rule(which=st.integers(0, 1000))
    def snapshot_arrives(self, which: int) -> None:
        name, incarnation, *rest = self.snapshots.pop(which % len(self.snapshots))
        if self._is_present(name, incarnation):
            self.copy.load_snapshot(name, incarnation, *rest)  # type: ignore[arg-type]

    @precondition(lambda self: self.snapshots)
    @rule(which=st.integers(0, 1000))
    def snapshot_begins(self, which: int) -> None:
        """Begin to load a snapshot. The load takes several steps, and other events come between
        them.
        """
        name, incarnation, *rest = self.snapshots.pop(which % len(self.snapshots))
        if self._is_present(name, incarnation):
            load = self.copy.begin_snapshot(name, incarnation, *rest)  # type: ignore[arg-type]
            self.loads += [load] if load is not None else []

    @precondition(lambda self: self.loads)
    @rule(which=st.integers(0, 1000), max_blocks=st.integers(1, 3))
    def snapshot_steps(self, which: int, max_blocks: int) -> None:
        load = self.loads[which % len(self.loads)]
        if load.step(max_blocks) is not None:
            self.loads.remove(load)

    @rule(max_blocks=st.integers(1, 3))
    def copy_sweeps(self, max_blocks: int) -> None:
        self.copy.sweep(max_blocks)

    @rule(name=names)
    def worker_restarts(self, name: str) -> None:
        worker = self.workers[name] = Worker(name, self.workers[name].incarnation + 1)
        known = self.copy.version(name)
        # the registry's record shows the restart
        if known is not None and known[0] != worker.incarnation:
            self.copy.retire_instance(name)

    @rule()
    def copy_restarts(self) -> None:
        self.copy, self.loads = PrefixIndex(), []

    @invariant()
    def keeps_its_own_invariants(self) -> None:
        self.copy.check_invariants()

    @invariant()
    def what_is_whole_and_up_to_date_is_true(self) -> None:
        for name, worker in self.workers.items():
            if self.copy.version(name) == (worker.incarnation, worker.sequence):
                for tier in TIERS:
                    assert self.copy.blocks(name, tier) == worker.held[tier]

    def teardown(self) -> None:
        """Check that one snapshot of an instance repairs its blocks in the copy in any case."""
        for name, worker in self.workers.items():
            is_loading = self.copy.is_loading(name)
            if is_loading or self.copy.version(name) != (worker.incarnation, worker.sequence):
                held = (worker.held[tier] for tier in TIERS)
                outcome = self.copy.load_snapshot(name, worker.incarnation, worker.sequence, *held)
                assert outcome is DeltaOutcome.APPLIED
        self.what_is_whole_and_up_to_date_is_true()
        rng = random.Random(0)
        for _ in range(5):
            prompt = rng.sample(BLOCKS, rng.randint(0, len(BLOCKS)))
            for tier in (None, *TIERS):
                assert self.copy.match(prompt, tier) == self._by_walking(prompt, tier)

    def _by_walking(self, prompt: list[bytes], tier: Tier | None) -> dict[str, int]:
        lengths = {}
        for name, worker in self.workers.items():
            held = set().union(*(worker.held[t] for t in TIERS if tier in (None, t)))
            length = 0
            while length < len(prompt) and prompt[length] in held:
                length += 1
            if length:
                lengths[name] = length
        return lengths

    def _is_present(self, name: str, incarnation: int) -> bool:
        """Say whether this is the present incarnation. The feed drops the messages of others."""
        return self.workers[name].incarnation == incarnation


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestIndex = pytest.mark.req("S101")(pytest.mark.fault("F20", "F22")(TestIndex))
