"""Which role may call which method."""

from __future__ import annotations

from pdmesh.core.access.operator_roles import NEEDED, AdminRole, changes, refusal
from pdmesh.v1 import admin_service_pb2

METHODS = {m.name for m in admin_service_pb2.DESCRIPTOR.services_by_name["AdminService"].methods}


def test_every_method_of_the_service_has_a_role() -> None:
    assert set(NEEDED) == METHODS


def test_methods_that_only_read_are_for_viewers_and_all_others_change() -> None:
    reads = {m for m in METHODS if m.startswith(("Get", "List", "Diff"))}
    assert {m for m in METHODS if not changes(m)} == reads


def test_a_role_may_do_what_lower_ones_may_and_no_more() -> None:
    for method, needed in NEEDED.items():
        for role in AdminRole:
            assert bool(refusal(method, role, "ann")) == (role < needed)
        assert refusal(method, None, "ann") == f"{method} needs the role {needed}; ann has none"
    assert refusal("ApplyDesired", AdminRole.OPERATOR, "ann") == (
        "ApplyDesired needs the role admin; ann has operator"
    )


def test_a_method_that_is_not_in_the_table_is_for_nobody() -> None:
    assert refusal("DropEverything", AdminRole.ADMIN, "ann") == "DropEverything is for nobody"
