"""Tokens are proposed where checking them is nearly free.

No tokens are proposed where checking one costs as much as drawing one.
"""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdmesh.core.instance.step_time_law import Law
from pdmesh.core.speculation.proposal_length import (
    LEAST_GAIN,
    NO_SPECULATION,
    PROBE_EVERY,
    AdaptiveSpeculation,
    Method,
    Speculation,
)
from pdmesh.engine.step_time_laws import MOCKER, SMOLLM2_CPU

CPU_COST = SMOLLM2_CPU.prefill_token_s / SMOLLM2_CPU.step_s(1, 0)


def test_a_step_yields_what_is_accepted_and_one_more() -> None:
    assert Speculation(4, 0.5, 0.01).tokens_per_step(0) == 1
    assert Speculation(4, 0.5, 0.01).tokens_per_step(2) == 1.75


@pytest.mark.req("S118")
@settings(max_examples=40)
@given(
    max_tokens=st.integers(0, 8),
    acceptance=st.floats(0.0, 0.95),
    token_cost=st.floats(1e-4, 0.2),
    max_batch=st.integers(1, 300),
)
def test_the_schedule_covers_every_batch_and_proposes_less_for_larger_ones(
    max_tokens: int, acceptance: float, token_cost: float, max_batch: int
) -> None:
    speculation = Speculation(max_tokens, acceptance, token_cost)
    ranges = speculation.schedule(max_batch)
    assert (ranges[0][0], ranges[-1][1]) == (1, max_batch)
    for (_, last, more), (first, _, fewer) in pairwise(ranges):
        assert first == last + 1
        assert fewer < more
    for first, _, count in ranges:
        assert 0 <= count <= max_tokens
        assert not count or speculation.speedup(count, first) >= LEAST_GAIN


def decode_s(law: Law, batch: int, num_proposed: int, acceptance: float) -> float:
    """Virtual seconds per token of a full batch.

    Checking a proposed token costs as much as computing a token of a prompt.
    """
    rng, drawn, seconds = random.Random(batch), 0, 0.0
    for _ in range(100):
        seconds += law.step_s(batch, batch * 100) + batch * num_proposed * law.prefill_token_s
        for _ in range(batch):
            drawn += 1
            for _ in range(num_proposed):
                if rng.random() >= acceptance:
                    break
                drawn += 1
    return seconds / drawn * batch


@pytest.mark.req("S118")
@pytest.mark.parametrize("law", [SMOLLM2_CPU, MOCKER], ids=lambda law: law.name)
def test_no_batch_is_slowed_by_three_percent_but_a_fixed_number_slows_large_ones(
    law: Law,
) -> None:
    cost = law.prefill_token_s / law.step_s(1, 0)
    speculation = Speculation(4, 0.6, cost)
    assert speculation.num_proposed(1) == 4
    for batch in (1, 4, 16, 64, 256, 1024):
        off = decode_s(law, batch, 0, 0.6)
        adapted = decode_s(law, batch, speculation.num_proposed(batch), 0.6)
        assert adapted <= 1.03 * off
    assert decode_s(law, 1, speculation.num_proposed(1), 0.6) < 0.6 * decode_s(law, 1, 0, 0.6)
    assert decode_s(law, 1024, 4, 0.6) > 1.03 * decode_s(law, 1024, 0, 0.6)
    assert speculation.num_proposed(1024) == 0


@pytest.mark.req("S118")
def test_a_small_model_on_a_cpu_proposes_no_tokens_in_large_batches() -> None:
    assert Speculation(4, 0.6, CPU_COST).num_proposed(256) == 0
    assert Speculation(4, 0.05, CPU_COST).num_proposed(1) == 0


# --- the checks decide how many tokens are proposed -----------------------------------------------


class Writing:
    """A decode with a full batch, whose proposals are right with probability `acceptance`."""

    def __init__(self, law: Law, batch: int, acceptance: float, seed: int = 1) -> None:
        self.law, self.batch, self.acceptance = law, batch, acceptance
        self.rng = random.Random(seed)
        self.seconds, self.num_drawn, self.num_proposed = 0.0, 0, 0

    def run(self, adaptive: AdaptiveSpeculation, num_steps: int) -> None:
        self.seconds, self.num_drawn, self.num_proposed = 0.0, 0, 0
        for _ in range(num_steps):
            count = adaptive.counts()[self.batch]
            assert type(count) is int, "vLLM compiles its code for this number"
            self.num_proposed += count * self.batch
            step_s = self.law.step_s(self.batch, self.batch * 100)
            step_s += self.batch * count * self.law.prefill_token_s
            self.seconds += step_s
            adaptive.computed(self.batch * (1 + count), step_s)
            for _ in range(self.batch):
                num_right = 0
                while num_right < count and self.rng.random() < self.acceptance:
                    num_right += 1
                self.num_drawn += 1 + num_right
                if count:
                    adaptive.checked(count, num_right)

    @property
    def tokens_per_s(self) -> float:
        return self.num_drawn / self.seconds


def adaptive_of(law: Law, batch: int, assumed: float, most: int = 4) -> AdaptiveSpeculation:
    cost = law.prefill_token_s / law.step_s(1, 0)
    return AdaptiveSpeculation(Speculation(most, assumed, cost), batch)


@pytest.mark.req("S118")
@pytest.mark.parametrize("batch", [1, 16, 256])
@pytest.mark.parametrize("assumed", [0.05, 0.9])
@pytest.mark.parametrize("acceptance", [0.0, 0.1, 0.6, 0.9])
def test_no_setting_slows_any_text_by_three_percent(
    batch: int, assumed: float, acceptance: float
) -> None:
    """The configured acceptance is a guess. Code repeats itself, and a poem does not."""
    writing = Writing(SMOLLM2_CPU, batch, acceptance)
    writing.run(adaptive_of(SMOLLM2_CPU, batch, 0.0, most=0), 20)
    off = writing.tokens_per_s
    adaptive = adaptive_of(SMOLLM2_CPU, batch, assumed)
    writing.run(adaptive, 40 + 3000 // batch)  # the speculation learns the text's acceptance
    writing.run(adaptive, 40 + 3000 // batch)
    assert writing.tokens_per_s >= 0.97 * off


@pytest.mark.req("S118")
def test_a_fixed_guess_would_have_slowed_the_text_that_repeats_nothing() -> None:
    """The control of the test above: with a fixed acceptance, this text is slowed down."""
    assumed = Speculation(4, 0.9, SMOLLM2_CPU.prefill_token_s / SMOLLM2_CPU.step_s(1, 0))
    count = assumed.num_proposed(16)
    assert count > 0
    off, fixed = (decode_s(SMOLLM2_CPU, 16, n, 0.0) for n in (0, count))
    assert fixed > 1.03 * off


@pytest.mark.req("S118")
@pytest.mark.parametrize("factor", [0.05, 20])
def test_a_wrong_guess_of_a_tokens_cost_is_corrected(factor: float) -> None:
    """Too low a cost would slow large batches down. With too high a cost, no batch would gain."""
    law, guess = SMOLLM2_CPU, Speculation(4, 0.6, factor * CPU_COST)
    right = Speculation(4, 0.6, CPU_COST)
    batches = (1, 4, 8, 16, 32)
    assert [guess.num_proposed(b) for b in batches] != [right.num_proposed(b) for b in batches]
    adaptive, writing = AdaptiveSpeculation(guess, max(batches)), Writing(law, 1, 0.6)
    for writing.batch in batches * 2:
        writing.run(adaptive, 300)
    for writing.batch in batches:
        off = writing.batch / law.step_s(writing.batch, writing.batch * 100)
        writing.run(adaptive, 250)
        assert writing.tokens_per_s >= 0.97 * off
    writing.batch = 1
    writing.run(adaptive, 250)
    assert writing.num_proposed > 250


@pytest.mark.req("S118")
def test_proposals_stop_and_resume_as_the_text_changes() -> None:
    """While proposals are off, one is tried now and then. Otherwise they would stay off forever."""
    adaptive, writing = adaptive_of(SMOLLM2_CPU, 1, 0.6), Writing(SMOLLM2_CPU, 1, 0.9)
    shares = []
    for writing.acceptance in (0.9, 0.0, 0.9):
        writing.run(adaptive, 5000)
        writing.run(adaptive, 640)
        shares.append(writing.num_proposed / 640)
    assert shares[0] > 3
    assert shares[1] <= 1 / PROBE_EVERY
    assert shares[2] > 3


@pytest.mark.req("S118")
def test_noise_around_a_boundary_does_not_change_the_schedule_back_and_forth() -> None:
    """At this acceptance, a batch of 16 is about to propose one token more."""
    cost = CPU_COST
    boundary = next(
        a / 1000
        for a in range(400, 900)
        if Speculation(4, a / 1000, cost).num_proposed(16)
        < Speculation(4, (a + 1) / 1000, cost).num_proposed(16)
    )
    adaptive = AdaptiveSpeculation(Speculation(4, boundary, cost), 16)
    followed, exact = [], []
    for step in range(200):
        adaptive.acceptance = boundary + (0.02 if step % 2 else -0.02)
        if (step + 1) % PROBE_EVERY:
            followed.append(adaptive.counts()[16])
            exact.append(Speculation(4, adaptive.acceptance, cost).num_proposed(16))
        else:
            adaptive.counts()
    assert len(set(followed)) == 1
    assert sum(a != b for a, b in pairwise(exact)) > 150, "the control: it would change each step"
    adaptive.acceptance = boundary + 0.1
    assert adaptive.counts()[16] > followed[0]


@pytest.mark.req("S67")
def test_a_prefill_computes_the_kv_of_a_draft_that_has_its_own() -> None:
    """The prefill computes no proposals, because its requests end with token 1. So one pass of the
    draft model over the prompt is enough.
    """
    lookup = Speculation(4, 0.6, 0.01)
    assert lookup.at_prefill() == replace(lookup, method=Method.SUFFIX).at_prefill()
    assert lookup.at_prefill() == NO_SPECULATION
    draft = replace(lookup, method=Method.DRAFT_MODEL, model="/models/small")
    assert draft.at_prefill() == replace(draft, max_tokens=1, is_fixed=True)
    assert replace(draft, max_tokens=0).at_prefill() == NO_SPECULATION


@pytest.mark.req("S118")
def test_a_fixed_schedule_proposes_the_same_for_every_batch() -> None:
    assert Speculation(3, 0.0, 9.0, is_fixed=True).schedule(500) == [(1, 500, 3)]


@pytest.mark.req("S118")
@settings(max_examples=25)
@given(acceptance=st.floats(0.0, 0.95), assumed=st.floats(0.0, 0.95), seed=st.integers(0, 99))
def test_only_tokens_that_were_checked_count_in_the_acceptance(
    acceptance: float, assumed: float, seed: int
) -> None:
    """If the first of four proposed tokens is wrong, only this one token was checked."""
    adaptive, rng = AdaptiveSpeculation(Speculation(4, assumed, 0.01), 8), random.Random(seed)
    for _ in range(500):
        num_right = 0
        while num_right < 4 and rng.random() < acceptance:
            num_right += 1
        adaptive.checked(4, num_right)
    assert adaptive.acceptance == pytest.approx(acceptance, abs=0.2)
