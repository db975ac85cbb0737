"""Limits the retries of a gateway in proportion to its requests.

Each request earns a fraction of a retry, and each retry spends one. So a fault that makes all
requests fail cannot multiply the load. A reserve of retries is enough for the loss of one instance
when the gateway has few requests.
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
        """Add the fraction of a retry that a new request earns."""
        self._balance = min(self.reserve, self._balance + self.ratio)

    def spend(self) -> bool:
        """Spend one retry. Returns False if none is left."""
        if self._balance < 1.0:
            return False
        self._balance -= 1.0
        return True
