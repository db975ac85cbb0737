"""Measures how long a client waits because of a KV fault.

A client's longest silence with the fault is compared with that of the same streams without it, in
the same mesh. The bound of a fault limits the difference. `make kv-faults` writes the results to
docs/kill-matrix.md. Only that target checks values without such a comparison: these are absolute
times, and `make test` must pass on a slow machine, too.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

# The only allowance for the machine: after a fault a process starts again on one of two shared
# cores. So beyond its bound, a time may grow by its value without the fault, or by one second if
# that is more.
NOISE_S: Final = 1.0


@dataclass(frozen=True)
class Measured:
    """One row of the table.

    `peace_s` is 0 if `took_s` is not a client's silence but the time until something was done.
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

    The result is recorded in both cases if the make target asks for it.
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
