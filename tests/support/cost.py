"""What a call costs beside what another one costs, here and now: a bound that holds on any machine.

It is this thread's CPU time, so that neighbours are not counted, and the least of a few rounds in
which both are measured in turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

_ROUNDS: Final = 5


def cost_ratio(call: Callable[[], object], reference: Callable[[], object]) -> float:
    """How many times as much CPU time `call` takes as `reference`."""
    spent_s: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(_ROUNDS):
        for is_reference, each in ((False, call), (True, reference)):
            began = time.thread_time()
            each()
            spent_s[is_reference].append(time.thread_time() - began)
    return min(spent_s[False]) / min(spent_s[True])
