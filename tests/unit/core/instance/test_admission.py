from dataclasses import replace

import pytest

from pdmesh.core.instance.admission import (
    Admission,
    Admitted,
    Ask,
    Capacity,
    RefusalReason,
    Refused,
    Work,
)

CAPACITY = Capacity(
    works=frozenset(Work),
    num_slots=2,
    num_blocks=16,
    block_size=64,
    block_bytes=4096,
    max_model_len=1024,
    staging_bytes=8 * 4096,
    landing_bytes=8 * 4096,
    max_retrievals=2,
    model_fingerprint="f1",
)


def ask(leg: int, work: Work = Work.PREFILL, num_tokens: int = 64, **other: object) -> Ask:
    values = {"max_tokens": 8, "remaining_s": 10.0, **other}
    return Ask(leg, work, num_tokens, **values)  # type: ignore[arg-type]  # a test's shorthand


def refusal(decision: Admitted | Refused) -> RefusalReason:
    assert isinstance(decision, Refused)
    return decision.reason


@pytest.mark.req("S40")
def test_an_idle_instance_admits_and_a_busy_one_refuses_at_once() -> None:
    admission = Admission(CAPACITY)
    assert isinstance(admission.admit(ask(1), 0), Admitted)
    assert isinstance(admission.admit(ask(2), 0), Admitted)
    refused = admission.admit(ask(3), 0)
    assert refusal(refused) is RefusalReason.BUSY
    assert isinstance(refused, Refused)
    assert refused.retry_after_ms >= 1
    admission.check_invariants()


@pytest.mark.req("S41")
def test_a_prefill_keeps_its_slot_until_its_ticket_is_closed() -> None:
    admission = Admission(replace(CAPACITY, num_slots=1))
    admission.admit(ask(1), 0)
    admission.computed(1)
    assert refusal(admission.admit(ask(2), 1)) is RefusalReason.BUSY
    admission.range_freed(1, 2)
    assert isinstance(admission.admit(ask(3), 2), Admitted)


def test_computed_kv_gives_its_blocks_back_but_not_its_staging_range() -> None:
    admission = Admission(CAPACITY)
    admission.admit(ask(1, num_tokens=500), 0)
    assert admission.num_blocks_free == 8
    admission.computed(1)
    assert admission.num_blocks_free == 16
    assert admission.staging_bytes_used == 8 * 4096
    assert refusal(admission.admit(ask(2), 0)) is RefusalReason.NO_STAGING


def test_an_aborted_prefill_keeps_its_range_while_it_may_be_read() -> None:
    admission = Admission(CAPACITY)
    admission.admit(ask(1), 0)
    admission.ended(1, 1)
    assert admission.num_slots_used == 1
    admission.range_freed(1, 2)
    assert admission.num_slots_used == 0
    assert admission.staging_bytes_used == 0


@pytest.mark.parametrize("landing_first", [True, False])
def test_a_decode_keeps_its_slot_until_it_has_ended_and_its_landing_is_free(
    landing_first: bool,
) -> None:
    admission = Admission(CAPACITY)
    admission.admit(ask(1, Work.DECODE), 0)
    first, second = admission.range_freed, admission.ended
    if not landing_first:
        first, second = second, first
    first(1, 1)
    assert admission.num_slots_used == 1
    second(1, 2)
    assert admission.num_slots_used == 0
    assert admission.landing_bytes_used == 0
    assert admission.num_blocks_free == 16


@pytest.mark.req("S53")
def test_retrievals_have_a_bound_of_their_own() -> None:
    admission = Admission(replace(CAPACITY, num_slots=4, max_retrievals=1))
    admission.admit(ask(1, Work.DECODE), 0)
    assert refusal(admission.admit(ask(2, Work.DECODE), 0)) is RefusalReason.BUSY
    admission.computed(1)
    assert isinstance(admission.admit(ask(3, Work.DECODE), 0), Admitted)


def test_a_decode_reserves_blocks_for_its_whole_answer() -> None:
    admission = Admission(CAPACITY)
    admission.admit(ask(1, Work.DECODE, 100, max_tokens=500), 0)
    assert admission.num_blocks_free == 16 - 10  # 100 prompt tokens, token 1 and 500 more tokens
    assert refusal(admission.admit(ask(2, Work.DECODE, 300, max_tokens=200), 0)) is (
        RefusalReason.NO_KV
    )


def test_an_engine_that_preempts_reserves_a_part_of_the_answer() -> None:
    admission = Admission(replace(CAPACITY, max_reserved_output=27))
    admission.admit(ask(1, Work.DECODE, 100, max_tokens=900), 0)
    assert admission.num_blocks_free == 14


def test_the_answer_is_never_reserved_beyond_the_context() -> None:
    admission = Admission(CAPACITY)
    admission.admit(ask(1, Work.LOCAL, 1000, max_tokens=100_000), 0)
    assert admission.num_blocks_free == 0


@pytest.mark.req("S95")
@pytest.mark.parametrize(
    "too_long",
    [
        ask(1, num_tokens=1024),  # no room for token 1
        ask(1, Work.DECODE, 1023),  # no room for token 2
        ask(1, num_tokens=513),  # the nine blocks do not fit into the arena
    ],
)
def test_a_prompt_that_an_empty_instance_cannot_hold_is_always_too_long(too_long: Ask) -> None:
    decision = Admission(CAPACITY).admit(too_long, 0)
    assert decision == Refused(RefusalReason.TOO_LONG, 0, decision.detail)  # type: ignore[union-attr]


def test_a_prompt_that_needs_more_blocks_than_exist_is_too_long() -> None:
    admission = Admission(replace(CAPACITY, num_blocks=4))
    assert refusal(admission.admit(ask(1, num_tokens=300), 0)) is RefusalReason.TOO_LONG


def test_refusals_name_role_model_deadline_and_drain() -> None:
    admission = Admission(replace(CAPACITY, works=frozenset({Work.DECODE})))
    assert refusal(admission.admit(ask(1), 0)) is RefusalReason.WRONG_ROLE
    other_model = ask(1, Work.DECODE, model_fingerprint="f2")
    assert refusal(admission.admit(other_model, 0)) is RefusalReason.WRONG_MODEL
    late = ask(1, Work.DECODE, remaining_s=0.0)
    assert refusal(admission.admit(late, 0)) is RefusalReason.EXPIRED
    admission.drain(True)
    assert refusal(admission.admit(ask(1, Work.DECODE), 0)) is RefusalReason.DRAINING
    admission.drain(False)
    assert isinstance(admission.admit(ask(1, Work.DECODE), 0), Admitted)


def test_a_refusal_changes_nothing() -> None:
    admission = Admission(CAPACITY)
    admission.admit(ask(1, num_tokens=500), 0)
    before = admission.version
    assert refusal(admission.admit(ask(2), 0)) is RefusalReason.NO_STAGING
    assert (admission.version, admission.num_slots_used) == (before, 1)
    admission.check_invariants()


def test_retry_after_follows_how_long_slots_are_held() -> None:
    admission = Admission(replace(CAPACITY, num_slots=1))
    waits = []
    for leg in range(60):
        admission.admit(ask(leg), leg)
        decision = admission.admit(ask(1000 + leg), leg)
        assert isinstance(decision, Refused)
        waits.append(decision.retry_after_ms)
        admission.ended(leg, leg + 0.5)
        admission.range_freed(leg, leg + 0.5)
    assert waits == sorted(waits)
    assert waits[0] == 20
    assert waits[-1] == pytest.approx(500, abs=5)


def test_repeated_events_and_events_of_unknown_legs_are_ignored() -> None:
    admission = Admission(CAPACITY)
    admission.admit(ask(1), 0)
    for _ in range(2):
        admission.computed(1)
        admission.ended(1, 0)
        admission.range_freed(1, 0)
        admission.range_freed(99, 0)
    assert admission.num_slots_used == 0
    assert admission.num_blocks_free == 16
    admission.check_invariants()


@pytest.mark.parametrize("work", list(Work))
def test_no_leg_of_another_model_is_taken_whatever_it_asks_for(work: Work) -> None:
    admission = Admission(replace(CAPACITY, model="mine"))
    fingerprint = "f1" if work is Work.DECODE else None
    for named in ("other", "Mine", "m" * 300):
        decision = admission.admit(ask(1, work, model=named, model_fingerprint=fingerprint), 0)
        assert refusal(decision) is RefusalReason.WRONG_MODEL
        assert isinstance(decision, Refused)
        assert len(decision.detail) < 200
    own = ask(1, work, model="mine", model_fingerprint=fingerprint)
    assert isinstance(admission.admit(own, 0), Admitted)


def test_legs_use_no_more_adapters_at_once_than_there_are_slots() -> None:
    admission = Admission(replace(CAPACITY, num_slots=6, num_adapters=2))
    for leg, adapter in enumerate("aab"):
        assert isinstance(admission.admit(ask(leg, Work.LOCAL, adapter=adapter), 0), Admitted)
    third = admission.admit(ask(9, Work.LOCAL, adapter="c"), 0)
    assert refusal(third) is RefusalReason.BUSY
    assert isinstance(admission.admit(ask(3, Work.LOCAL), 0), Admitted), (
        "a leg without an adapter takes no adapter slot"
    )
    admission.ended(0, 1)
    assert refusal(admission.admit(ask(9, Work.LOCAL, adapter="c"), 1)) is RefusalReason.BUSY
    admission.ended(1, 1)
    admission.ended(1, 1)
    assert isinstance(admission.admit(ask(9, Work.LOCAL, adapter="c"), 1), Admitted)
    admission.check_invariants()


def test_a_staged_prompt_keeps_its_slot_and_not_its_adapter() -> None:
    admission = Admission(replace(CAPACITY, num_adapters=1))
    admission.admit(ask(1, adapter="a"), 0)
    assert refusal(admission.admit(ask(2, adapter="b"), 0)) is RefusalReason.BUSY
    admission.computed(1)
    assert isinstance(admission.admit(ask(2, adapter="b"), 0), Admitted)
    admission.check_invariants()


def test_an_instance_without_slots_for_adapters_refuses_them_permanently() -> None:
    decision = Admission(CAPACITY).admit(ask(1, adapter="a"), 0)
    assert refusal(decision) is RefusalReason.WRONG_MODEL
    assert isinstance(decision, Refused)
    assert decision.retry_after_ms == 0


def test_an_adapter_keeps_its_turn_while_there_is_no_slot_for_any_leg() -> None:
    admission = Admission(replace(CAPACITY, num_slots=2, num_adapters=1))
    assert isinstance(admission.admit(ask(1, Work.LOCAL, adapter="a"), 0), Admitted)
    assert isinstance(admission.admit(ask(2, Work.LOCAL, adapter="a"), 0), Admitted)
    for now in range(1, 20):
        assert refusal(admission.admit(ask(9, Work.LOCAL, adapter="b"), now)) is RefusalReason.BUSY
    admission.ended(1, 20)
    assert refusal(admission.admit(ask(3, Work.LOCAL, adapter="a"), 20)) is RefusalReason.BUSY
    assert isinstance(admission.admit(ask(4, Work.LOCAL), 20), Admitted), "it needs no adapter"
    admission.ended(2, 21)
    assert isinstance(admission.admit(ask(9, Work.LOCAL, adapter="b"), 21), Admitted)
    admission.check_invariants()


@pytest.mark.req("S128")
def test_an_instance_whose_model_takes_no_images_refuses_them_permanently() -> None:
    decision = Admission(CAPACITY).admit(ask(1, has_images=True), 0)
    assert refusal(decision) is RefusalReason.WRONG_MODEL
    admission = Admission(replace(CAPACITY, takes_images=True))
    assert isinstance(admission.admit(ask(1, has_images=True), 0), Admitted)
