"""Tests which role an operator has, and which methods of the admin API each role may call."""

from __future__ import annotations

import pytest

from pdmesh.core.access.operator_roles import (
    NEEDED,
    AdminRole,
    ShownRole,
    refusal,
    role_without_token,
)
from pdmesh.v1 import admin_service_pb2

METHODS = {m.name for m in admin_service_pb2.DESCRIPTOR.services_by_name["AdminService"].methods}


def test_every_method_of_the_service_has_a_role() -> None:
    assert set(NEEDED) == METHODS


def test_methods_that_only_read_are_for_viewers_and_all_others_change() -> None:
    reads = {m for m in METHODS if m.startswith(("Get", "List", "Diff"))}
    assert {m for m in METHODS if NEEDED[m] is AdminRole.VIEWER} == reads


def test_a_role_may_do_what_lower_ones_may_and_no_more() -> None:
    for method, needed in NEEDED.items():
        for role in AdminRole:
            assert bool(refusal(method, role, "ann")) == (role < needed)
        assert refusal(method, None, "ann") == f"{method} needs the role {needed}; ann has none"
    assert refusal("ApplyDesired", AdminRole.OPERATOR, "ann") == (
        "ApplyDesired needs the role admin; ann has operator"
    )


def test_a_method_that_is_not_in_the_table_is_for_nobody() -> None:
    assert (
        refusal("DropEverything", AdminRole.ADMIN, "ann")
        == "DropEverything may be called by nobody"
    )


@pytest.mark.parametrize(
    ("certificate_role", "is_local", "expected"),
    [
        ("viewer", True, ShownRole("certificate", AdminRole.VIEWER)),
        ("operator", False, ShownRole("certificate", AdminRole.OPERATOR)),
        ("prefill", True, ShownRole("certificate", None)),  # a process of the mesh is no operator
        (None, True, ShownRole("local", AdminRole.ADMIN)),
        (None, False, None),
    ],
)
def test_without_a_token_the_certificate_decides_and_then_the_address(
    certificate_role: str | None, is_local: bool, expected: ShownRole | None
) -> None:
    def found(*, has_admin_token: bool) -> ShownRole | None:
        return role_without_token(
            has_admin_token=has_admin_token, certificate_role=certificate_role, is_local=is_local
        )

    assert found(has_admin_token=False) == expected
    assert found(has_admin_token=True) is None
