"""What a fault of KV costs a client: its longest silence, beside the longest of the same streams in
peace in the same mesh.

The bound of a fault is what it may cost beyond peace. `make kv-faults` writes what was measured to
docs/kill-matrix.md, and it alone judges what has no peace beside it: that is a time, and
`make test` is green on a slow machine, too.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

# The only allowance for the machine: beside a fault a process starts again on one of two shared
# cores, so what takes t in peace may take t longer, and a second where t is less than that.
NOISE_S: Final = 1.0


@dataclass(frozen=True)
class Measured:
    """One row of the table.

    `peace_s` is 0 where `took_s` is no client's silence, but the time until something was done.
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
    """Fails if it took longer than the bound allows; recorded either way, where the make target
    asks for it.
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
