"""The search finds the smallest deployment.

With one instance less, a goal is missed. If no deployment is possible, the reason is given.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from loadtests.sizing.scenes import SCENES
from pdmesh.core.sizing.accelerators import accelerator
from pdmesh.core.sizing.deployment import PREFILL_SLOTS, Deployment
from pdmesh.core.sizing.instance_kind import kinds_of
from pdmesh.core.sizing.model_shape import model_shape
from pdmesh.core.sizing.search import (
    NotPossible,
    Workload,
    holds,
    smallest_fusion,
    smallest_pair,
)
from pdmesh.core.sizing.traffic import Goals, traffic_of
from tests.unit.core.sizing.test_model_shape import DEEPSEEK_V3

SHORT = SCENES[0]


def short_chat(rate_per_s: float, least: int = 1) -> Workload:
    """A workload of short chats, with two numbers of ranks to choose from."""
    wanted = SHORT.wanted(rate_per_s, least)
    return replace(wanted, kinds=wanted.kinds[:2])


def made(found: Deployment | NotPossible) -> Deployment:
    assert isinstance(found, Deployment)
    return found


@pytest.mark.parametrize("search", [smallest_pair, smallest_fusion])
def test_one_instance_less_does_not_hold(search: object) -> None:
    wanted = short_chat(200.0)
    found = made(search(wanted))  # type: ignore[operator]
    assert holds(found, wanted)
    for index, pool in enumerate(found.pools):
        fewer = tuple(
            replace(each, count=each.count - (i == index)) for i, each in enumerate(found.pools)
        )
        assert pool.count > 1
        assert not holds(replace(found, pools=fewer), wanted)


def test_more_load_never_needs_fewer() -> None:
    for search in (smallest_pair, smallest_fusion):
        sizes = [made(search(short_chat(rate))).num_gpus for rate in (5.0, 50.0, 200.0, 400.0)]
        assert sizes == sorted(sizes)
        assert sizes[0] < sizes[-1]


def test_each_role_has_at_least_what_is_asked_for() -> None:
    found = made(smallest_pair(short_chat(1.0, least=3)))
    assert [pool.count for pool in found.pools] == [3, 3]
    assert found.pools[0].slots == PREFILL_SLOTS
    assert made(smallest_fusion(short_chat(1.0, least=3))).pools[0].count == 3


def test_goals_that_no_number_holds_are_refused_with_the_time_alone() -> None:
    wanted = short_chat(10.0)
    strict = replace(wanted, goals=Goals(0.0001, 1.0))
    slow = replace(wanted, goals=Goals(10.0, 0.0001))
    for search in (smallest_pair, smallest_fusion):
        first, following = search(strict), search(slow)
        assert isinstance(first, NotPossible)
        assert "first tokens come within" in first.reason
        assert isinstance(following, NotPossible)
        assert "a token takes" in following.reason


def test_requests_that_do_not_fit_the_kv_are_told() -> None:
    shape, device = model_shape(DEEPSEEK_V3), accelerator("custom:h200,memory_gib=101")
    kinds = tuple(kinds_of(shape, device, (8,)))
    found = smallest_pair(Workload(traffic_of(1.0, "200000", "9", 0.0), Goals(9.0, 9.0), kinds))
    assert isinstance(found, NotPossible)
    assert "does not fit the KV" in found.reason


def test_latent_kv_moves_between_unequal_ranks_too() -> None:
    """Each rank has a copy of the latent KV. For long answers, decodes of 16 ranks need the fewest
    devices.
    """
    kinds = tuple(kinds_of(model_shape(DEEPSEEK_V3), accelerator("h200"), (8, 16)))
    wanted = Workload(traffic_of(8.0, "500", "2000", 0.0), Goals(1.0, 0.03), kinds)
    found = made(smallest_pair(wanted))
    assert [pool.kind.tp for pool in found.pools] == [8, 16]
    for kind in kinds:
        equal = smallest_pair(replace(wanted, kinds=(kind,)))
        assert isinstance(equal, NotPossible) or equal.num_gpus > found.num_gpus


def test_a_thin_network_asks_for_more_instances() -> None:
    wanted = short_chat(200.0)
    thin = tuple(replace(kind, network_bandwidth=5e9) for kind in wanted.kinds)
    found = made(smallest_pair(replace(wanted, kinds=thin)))
    assert found.num_gpus > made(smallest_pair(wanted)).num_gpus
