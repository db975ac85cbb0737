"""Checks measured times after faults against bounds, and records them for docs/kill-matrix.md.

A client's longest silence with the fault is compared with the longest silence of the same streams
without the fault, in the same mesh. Each fault has a bound for the difference. Some faults have
only an absolute time, and no silence to compare it with. Only `make kv-faults` checks these times,
because `make test` must pass on a slow machine.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

# An allowance for noise: the machine has two shared cores, and after a fault a process restarts on
# one of them. The difference may exceed its bound by NOISE_S, or by the silence without the fault
# if that is longer.
NOISE_S: Final = 1.0


@dataclass(frozen=True)
class Measured:
    """One row of the table in docs/kill-matrix.md.

    `took_s` is a client's longest silence with the fault, and `peace_s` without it. If `peace_s` is
    0, there is no silence to compare with, and `took_s` is the time until the event that `what`
    names.
    """

    fault: str
    what: str
    peace_s: float
    took_s: float
    bound_s: float

    @property
    def allowed_s(self) -> float:
        return self.bound_s + self.peace_s + max(self.peace_s, NOISE_S)


def judge(fault: str, what: str, *, peace_s: float = 0.0, took_s: float, bound_s: float) -> None:
    """Fail if the fault took longer than its bound allows.

    `make kv-faults` also records the result.
    """
    is_asked_for = bool(os.environ.get("KILL_MATRIX_DIR"))
    if not peace_s and not is_asked_for:
        return
    measured = Measured(fault, what, round(peace_s, 3), round(took_s, 3), bound_s)
    if directory := os.environ.get("KILL_MATRIX_DIR"):
        path = Path(directory) / "kv" / f"{fault}-{time.monotonic_ns()}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(asdict(measured) | {"allowed_s": round(measured.allowed_s, 2)}))
    assert took_s <= measured.allowed_s, f"{measured} is allowed {measured.allowed_s:.2f} s"
