"""The revision that each group runs, and the canary group that tries a new one."""

from __future__ import annotations

import pytest

from pdmesh.core.groups.desired import (
    Desired,
    Group,
    Scenario,
    Service,
)
from pdmesh.core.groups.revisions import (
    Upgrade,
    canary_of,
    with_canaries,
)


@pytest.mark.req("S24")
@pytest.mark.parametrize(
    ("racks", "expected"),
    [
        ((("r1",), ("r2",)), ("r1", "r2")),
        ((("r1", "r2"), ("r2", "r3")), ("r1", "r2", "r3")),
        ((("r1",), ()), ()),
    ],
)
def test_a_canary_may_be_in_any_of_its_scenarios_racks(
    racks: tuple[tuple[str, ...], ...], expected: tuple[str, ...]
) -> None:
    groups = {f"g{i}": Group("chat", 2, 2, racks=each) for i, each in enumerate(racks)}
    desired = Desired({"model": Service(release="1")}, {"chat": Scenario("model")}, groups)
    upgrade = Upgrade("chat", Service(), 1, Service(release="1"), 2, canary_share=0.1)
    canary = with_canaries(desired, {"chat": upgrade}).groups[canary_of("chat")]
    assert canary.racks == expected
