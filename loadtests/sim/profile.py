"""Profiles a kind of instance in advance from its law: the input of formula (1) (S27, S30)."""

from __future__ import annotations

from pdmesh.core.instance.step_time_law import Law
from pdmesh.core.ratio.throughput import Profile


def profile(
    law: Law,
    *,
    num_prompt: int,
    num_output: int,
    prefill_slots: int,
    decode_slots: int,
    num_cached: int = 0,
    transfer_s: float = 0.0,
) -> Profile:
    """Tokens are per request, slots are per instance; `transfer_s` is xi of one request.

    Raises ValueError for `num_output` < 2.
    """
    if num_output < 2:
        raise ValueError("num_output must be 2 or more: one token needs no decode")
    num_new = prefill_slots * (num_prompt - num_cached)
    step_s = law.step_s(decode_slots, int(decode_slots * (num_prompt + num_output / 2)))
    return Profile(
        t_p=law.prefill_s(num_new, num_cached, prefill_slots),
        b_p=prefill_slots,
        t_d=transfer_s + (num_output - 1) * step_s,
        b_d=decode_slots,
    )
