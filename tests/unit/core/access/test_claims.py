"""A valid token's claims name the tenant, its limits, the caller and the caller's role."""

from __future__ import annotations

import math
from typing import Any

import pytest

from pdmesh.core.access.claims import (
    MAX_WHO_CHARS,
    BadClaims,
    ClaimNames,
    claim_of,
    role_of,
    tenant_of,
    who_of,
)
from pdmesh.core.access.operator_roles import AdminRole
from pdmesh.core.tenancy.tenant import TenantEntry

NAMES = ClaimNames(limits="pdmesh", role="realm_access.roles")


def test_a_claim_is_found_by_its_whole_name_before_its_path() -> None:
    claims = {"https://x.org/tenant": 1, "a": {"b": 2, "c": {"d": 3}}, "a.b": 4}
    names = ("https://x.org/tenant", "a.b", "a.c.d", "a.c", "a.x", "a.c.d.e", "x", "a.b.c")
    assert [claim_of(claims, name) for name in names] == [1, 4, 3, {"d": 3}, None, None, None, None]


def test_the_tenant_and_its_limits_are_those_of_the_claims() -> None:
    limits = {"requests_per_s": 2, "tokens_per_day": 9, "priority": 0, "models": ["m"], "weight": 3}
    tenant = tenant_of({"tenant": "acme", "pdmesh": limits}, NAMES)
    assert (tenant.name, tenant.priority, tenant.weight) == ("acme", 0, 3)
    assert (tenant.limits.requests_per_s, tenant.limits.tokens_per_day) == (2, 9)
    assert tenant.limits.max_concurrent is None
    assert tenant.models == {"m"}


def test_a_token_without_limits_has_the_default_ones() -> None:
    names = ClaimNames(limits="pdmesh", default=TenantEntry(max_concurrent=7))
    assert tenant_of({"tenant": "acme"}, names).limits.max_concurrent == 7
    assert tenant_of({"tenant": "acme", "pdmesh": {}}, names).limits.max_concurrent is None
    unread = ClaimNames(default=TenantEntry(max_concurrent=7))
    assert tenant_of({"tenant": "a", "": {"weight": 2}}, unread).limits.max_concurrent == 7


@pytest.mark.parametrize(
    ("claims", "claim"),
    [
        ({}, "tenant"), ({"tenant": None}, "tenant"), ({"tenant": 7}, "tenant"),
        ({"tenant": ["acme"]}, "tenant"), ({"tenant": "Acme"}, "tenant"),
        ({"tenant": ""}, "tenant"),
        ({"tenant": "a" * 64}, "tenant"), ({"tenant": "a\n"}, "tenant"),
        ({"tenant": "a.b"}, "tenant"),
        ({"tenant": "a", "pdmesh": []}, "pdmesh"), ({"tenant": "a", "pdmesh": "x"}, "pdmesh"),
        ({"tenant": "a", "pdmesh": {"requests_per_s": "2"}}, "pdmesh"),
        ({"tenant": "a", "pdmesh": {"requests_per_s": 0}}, "pdmesh"),
        ({"tenant": "a", "pdmesh": {"tokens_per_min": math.nan}}, "pdmesh"),
        ({"tenant": "a", "pdmesh": {"tokens_per_min": math.inf}}, "pdmesh"),
        ({"tenant": "a", "pdmesh": {"max_concurrent": -1}}, "pdmesh"),
        ({"tenant": "a", "pdmesh": {"max_concurrent": True}}, "pdmesh"),
        ({"tenant": "a", "pdmesh": {"max_concurent": 1}}, "pdmesh"),
        ({"tenant": "a", "pdmesh": {"priority": -1}}, "pdmesh"),
    ],
)  # fmt: skip
def test_bad_claims_are_refused_by_name(claims: dict[str, Any], claim: str) -> None:
    with pytest.raises(BadClaims) as refused:
        tenant_of(claims, NAMES)
    assert refused.value.claim == claim
    assert str(refused.value).startswith(f"claim {claim}: ")


@pytest.mark.parametrize(
    ("found", "role"),
    [
        ("pdmesh-viewer", AdminRole.VIEWER), (["pdmesh-viewer", "pdmesh-admin"], AdminRole.ADMIN),
        (["x", "pdmesh-operator", 7], AdminRole.OPERATOR), ("admin", None), ([], None),
        (None, None),
        ({"pdmesh-admin": 1}, None), ("PDMESH-ADMIN", None),
    ],
)  # fmt: skip
def test_the_highest_of_the_named_roles_counts(found: Any, role: AdminRole | None) -> None:
    assert role_of({"realm_access": {"roles": found}}, NAMES) is role


def test_without_a_name_for_the_claim_no_token_gives_a_role() -> None:
    assert role_of({"": "pdmesh-admin", "role": "pdmesh-admin"}, ClaimNames()) is None


def test_a_caller_is_named_by_its_subject_first() -> None:
    assert who_of({"sub": "u-1", "email": "ann@x.org"}) == "u-1 (ann@x.org)"
    assert who_of({"sub": "u-1", "preferred_username": "ann"}) == "u-1 (ann)"
    assert who_of({"sub": "ann", "email": "ann"}) == "ann"
    assert who_of({"sub": "a\n\x1b[31mb"}) == "a[31mb"
    assert len(who_of({"sub": "a" * 1000})) == MAX_WHO_CHARS
