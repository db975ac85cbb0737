"""Computes the profile of a kind of instance from its law, as the input of formula (1) (S27,
S30).
"""

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
    """The profile for requests of these lengths.

    Tokens are per request, and slots are per instance. `transfer_s` is xi, the KV transfer's time
    for one request. Raises ValueError if `num_output` is below 2.
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
