from itertools import pairwise

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdmesh.core.instance.admission import (
    Admission,
    Admitted,
    Ask,
    Capacity,
    Work,
)
from pdmesh.core.instance.arena import ArenaRange

WITH_RANGE = (Work.PREFILL, Work.DECODE)
CAPACITY = Capacity(
    works=frozenset(Work),
    num_slots=4,
    num_blocks=24,
    block_size=16,
    block_bytes=4096,
    max_model_len=256,
    staging_bytes=20 * 4096,
    landing_bytes=10 * 4096,
    max_retrievals=2,
)


class AdmissionMachine(RuleBasedStateMachine):
    """Offers, results, aborts and late frees in any order, each of them once or several times."""

    def __init__(self) -> None:
        super().__init__()
        self.admission = Admission(CAPACITY)
        self.now = 0.0
        self.last_leg = 0
        self.ranges: dict[int, tuple[Work, ArenaRange | None]] = {}
        self.ended: set[int] = set()
        self.freed: set[int] = set()

    @rule(
        work=st.sampled_from(Work),
        num_tokens=st.integers(1, 255),
        max_tokens=st.integers(1, 400),
        remaining_s=st.sampled_from([0.0, 1.0]),
    )
    def asks(self, work: Work, num_tokens: int, max_tokens: int, remaining_s: float) -> None:
        self.now += 0.01
        self.last_leg += 1
        used = self.admission.num_slots_used
        ask = Ask(self.last_leg, work, num_tokens, max_tokens, remaining_s)
        decision = self.admission.admit(ask, self.now)
        assert self.admission.num_slots_used == used + isinstance(decision, Admitted)
        if isinstance(decision, Admitted):
            assert (decision.range is None) == (work not in WITH_RANGE)
            self.ranges[self.last_leg] = (work, decision.range)

    @precondition(lambda self: self.ranges)
    @rule(data=st.data(), event=st.sampled_from(["computed", "ended", "range_freed"]))
    def happens(self, data: st.DataObject, event: str) -> None:
        self.now += 0.01
        leg = data.draw(st.sampled_from(sorted(self.ranges)))
        self.tell(leg, event)

    def tell(self, leg: int, event: str) -> None:
        work, _ = self.ranges[leg]
        match event:
            case "computed":
                self.admission.computed(leg)
            case "ended":
                self.admission.ended(leg, self.now)
                self.ended.add(leg)
            case "range_freed":
                self.admission.range_freed(leg, self.now)
                if work in WITH_RANGE:
                    self.freed.add(leg)
                if work is Work.PREFILL:
                    self.ended.add(leg)

    @invariant()
    def keeps_its_own_invariants(self) -> None:
        self.admission.check_invariants()

    @invariant()
    def holds_a_slot_exactly_for_the_legs_not_yet_over(self) -> None:
        over = {
            leg
            for leg, (work, _) in self.ranges.items()
            if leg in self.ended and (leg in self.freed or work not in WITH_RANGE)
        }
        assert self.admission.num_slots_used == len(self.ranges) - len(over)

    @invariant()
    def never_overlaps_ranges_that_are_in_use(self) -> None:
        for kind in WITH_RANGE:
            spans = sorted(
                (r.offset, r.length)
                for leg, (work, r) in self.ranges.items()
                if work is kind and r is not None and leg not in self.freed
            )
            for (start, length), (after, _) in pairwise(spans):
                assert start + length <= after

    def teardown(self) -> None:
        for leg in self.ranges:
            self.tell(leg, "range_freed")
            self.tell(leg, "ended")
        assert self.admission.num_slots_used == 0
        assert self.admission.num_blocks_free == CAPACITY.num_blocks
        assert self.admission.num_retrieving == 0
        assert self.admission.staging_bytes_used == self.admission.landing_bytes_used == 0
        self.admission.check_invariants()


TestAdmission = AdmissionMachine.TestCase
TestAdmission.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
