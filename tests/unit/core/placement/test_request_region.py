"""Requests stay in the region of their gateway while a group in that region has room."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from pdmesh.core.model import Role
from pdmesh.core.placement.fleet import Fleet, InstanceRecorded, InstanceUnrecorded
from pdmesh.core.placement.fleet import LoadReported as Load
from pdmesh.core.placement.instance import Identity
from pdmesh.core.placement.plan import Placement, Plan
from pdmesh.core.placement.policies import Query
from pdmesh.core.placement.request_region import nearest

pytestmark = pytest.mark.req("S58")


def identity(region: str, role: Role, kv_region: str | None = None) -> Identity:
    return Identity(
        f"{region}-{role.value}", 1, role, f"chat-{region}", "default", "m", "f", 64, 2, 1000, 8192,
        region=region, kv_region=region if kv_region is None else kv_region,
    )  # fmt: skip


def placement() -> Placement:
    fleet = Fleet()
    for region in ("eu", "us"):
        for role in (Role.PREFILL, Role.DECODE):
            fleet.handle(InstanceRecorded(identity(region, role)), now=0.0)
    return Placement(fleet, random.Random(1))


def place(among: Placement, region: str, **matches: int) -> str:
    named = {name.replace("_", "-"): n for name, n in matches.items()}
    query = Query(model="m", num_prompt_tokens=640, block_hashes=(b"x",) * 10, region=region)
    plan = among.plan(query, named, 0.0)
    assert isinstance(plan, Plan), plan
    return plan.group_id


def busy(name: str) -> Load:
    return Load(name, 1, 2, 2, 1000, is_draining=False)


def test_requests_stay_in_their_region_even_where_another_holds_their_prefix() -> None:
    assert place(placement(), "eu", us_prefill=10) == "chat-eu"
    assert place(placement(), "us", eu_prefill=10) == "chat-us"
    assert place(placement(), "", us_prefill=10) == "chat-us"


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_requests_go_to_another_region_when_theirs_is_full_or_gone(role: str) -> None:
    among = placement()
    among.fleet.handle(busy(f"eu-{role}"), 0.0)
    assert place(among, "eu") == "chat-us"
    among.fleet.handle(busy(f"us-{role}"), 0.0)
    assert place(among, "eu") == "chat-eu"
    among.fleet.handle(InstanceUnrecorded(f"eu-{role}"), 0.0)
    assert place(among, "eu") == "chat-us"


@dataclass(frozen=True)
class Cell:
    region: str
    has_room: bool = True


EAST, WEST, ANYWHERE = Cell("east"), Cell("west"), Cell("")
FULL = Cell("east", has_room=False)
FULL_WEST = Cell("west", has_room=False)


@pytest.mark.req("S58")
@pytest.mark.parametrize(
    ("cells", "region", "expected"),
    [
        ([EAST, WEST, ANYWHERE], "east", [EAST, ANYWHERE]),
        ([FULL, EAST, WEST], "east", [FULL, EAST]),  # one near group with room is enough
        ([FULL, WEST, FULL_WEST], "east", [WEST]),
        ([FULL, FULL_WEST], "east", [FULL]),  # all are full, so the request waits in its region
        ([EAST, WEST], "north", [EAST, WEST]),  # no group is near
        ([EAST, WEST], "", [EAST, WEST]),
        ([WEST], "east", [WEST]),
        ([], "east", []),
    ],
)
def test_a_request_leaves_its_region_only_if_that_is_full_or_empty(
    cells: list[Cell], region: str, expected: list[Cell]
) -> None:
    assert nearest(cells, region) == expected
