"""Decides how many retries a gateway may add to the work its clients asked for.

Each request earns a fraction of a retry and each retry spends one, so that a fault that fails
everything cannot multiply the load. A reserve covers one lost instance on a quiet gateway.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

RATIO: Final = 0.2
RESERVE: Final = 500.0


@dataclass(slots=True)
class RetryBudget:
    ratio: float = RATIO
    reserve: float = RESERVE
    _balance: float = -1.0

    def __post_init__(self) -> None:
        if self._balance < 0:
            self._balance = self.reserve

    def earn(self) -> None:
        """A request was accepted."""
        self._balance = min(self.reserve, self._balance + self.ratio)

    def spend(self) -> bool:
        """Take one retry; False if there is none."""
        if self._balance < 1.0:
            return False
        self._balance -= 1.0
        return True
