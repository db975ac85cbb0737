"""A tenant's entry in the key file, or in the claims of a token."""

from __future__ import annotations

import math
import re
from typing import Final

import msgspec

from pdmesh.core.tenancy.limits import Tenant, TenantLimits

NAME: Final = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")


class TenantEntry(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """The settings of a tenant. A limit of null means no limit."""

    requests_per_s: float | None = None
    tokens_per_min: float | None = None
    max_concurrent: int | None = None
    tokens_per_day: int | None = None
    weight: int = 1
    priority: int = 1
    models: list[str] = []
    is_disabled: bool = False

    def has_valid_limits(self) -> bool:
        limits = (
            self.requests_per_s, self.tokens_per_min, self.max_concurrent,
            self.tokens_per_day, self.weight,
        )  # fmt: skip
        return all(limit is None or 0 < limit < math.inf for limit in limits) and self.priority >= 0

    def tenant(self, name: str) -> Tenant:
        limits = TenantLimits(
            self.requests_per_s, self.tokens_per_min, self.max_concurrent, self.tokens_per_day
        )
        return Tenant(
            name,
            limits,
            weight=self.weight,
            priority=self.priority,
            models=frozenset(self.models),
            is_disabled=self.is_disabled,
        )
