"""Compares the cost of a call with that of another call, so that a bound holds on any machine.

The cost is the CPU time of this thread, so other threads have no effect. Both calls are measured in
alternation for a few rounds, and the smallest value of each is used.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

_ROUNDS: Final = 5


def cost_ratio(call: Callable[[], object], reference: Callable[[], object]) -> float:
    """The CPU time of `call` divided by the CPU time of `reference`."""
    spent_s: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(_ROUNDS):
        for is_reference, each in ((False, call), (True, reference)):
            began = time.thread_time()
            each()
            spent_s[is_reference].append(time.thread_time() - began)
    return min(spent_s[False]) / min(spent_s[True])
