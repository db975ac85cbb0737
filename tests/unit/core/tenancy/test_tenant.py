"""A tenant is read from its entry in a file."""

from __future__ import annotations

import math

import pytest

from pdmesh.core.tenancy.limits import Tenant, TenantLimits
from pdmesh.core.tenancy.tenant import NAME, TenantEntry


def test_an_entry_becomes_the_tenant_that_it_says() -> None:
    entry = TenantEntry(1.5, 60.0, 4, 1000, weight=2, priority=0, models=["m"], is_disabled=True)
    limits = TenantLimits(1.5, 60.0, 4, 1000)
    assert entry.tenant("acme") == Tenant(
        "acme", limits, weight=2, priority=0, models=frozenset({"m"}), is_disabled=True
    )
    assert TenantEntry().tenant("acme") == Tenant("acme")


@pytest.mark.parametrize(
    ("entry", "is_valid"),
    [
        (TenantEntry(), True), (TenantEntry(requests_per_s=0.1, priority=0), True),
        (TenantEntry(requests_per_s=0), False), (TenantEntry(tokens_per_min=math.nan), False),
        (TenantEntry(tokens_per_min=math.inf), False), (TenantEntry(max_concurrent=-1), False),
        (TenantEntry(tokens_per_day=0), False), (TenantEntry(weight=0), False),
        (TenantEntry(priority=-1), False),
    ],
)  # fmt: skip
def test_limits_are_positive_numbers(entry: TenantEntry, is_valid: bool) -> None:
    assert entry.has_valid_limits() is is_valid


def test_names_fit_into_labels_and_keys() -> None:
    assert NAME.fullmatch("a-1")
    assert not any(NAME.fullmatch(name) for name in ("", "A", "-a", "a.b", "a\n", "a" * 64))
