"""Compares the cost of a call with that of another call, so that a bound holds on any machine.

The cost is this thread's CPU time, so other threads do not count. Both calls are measured in turn
for a few rounds, and the least value of each counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

_ROUNDS: Final = 5


def cost_ratio(call: Callable[[], object], reference: Callable[[], object]) -> float:
    """The CPU time of `call` as a multiple of that of `reference`."""
    spent_s: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(_ROUNDS):
        for is_reference, each in ((False, call), (True, reference)):
            began = time.thread_time()
            each()
            spent_s[is_reference].append(time.thread_time() - began)
    return min(spent_s[False]) / min(spent_s[True])
