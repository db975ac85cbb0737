"""The gateway to which a proxy in front of the mesh should send a request."""

from __future__ import annotations

from collections import Counter

import pytest

from pdmesh.core.placement.gateway_ranking import GatewayEndpoint, GatewayQuery, GatewayRanking


def of(num: int, *regions: str) -> GatewayRanking:
    ranking = GatewayRanking()
    regions = regions or ("",)
    ranking.see(
        GatewayEndpoint(f"g{n}", f"10.0.0.{n}:80", regions[n % len(regions)]) for n in range(num)
    )
    return ranking


def first(ranking: GatewayRanking, query: GatewayQuery, loads: dict[str, int]) -> str:
    return ranking.rank(query, lambda address: loads.get(address, 0))[0].id


def keys(num: int) -> list[bytes]:
    return [f"chat {n}".encode() for n in range(num)]


def test_without_a_key_the_gateway_with_the_fewest_open_requests_comes_first() -> None:
    loads = {"10.0.0.0:80": 4, "10.0.0.1:80": 0, "10.0.0.2:80": 2}
    ranked = of(3).rank(GatewayQuery(), loads.__getitem__)
    assert [g.id for g in ranked] == ["g1", "g2", "g0"]


def test_requests_with_an_equal_key_go_to_one_gateway_and_keys_are_spread() -> None:
    ranking = of(4)
    homes = {key: first(ranking, GatewayQuery(key), {}) for key in keys(400)}
    assert {key: first(ranking, GatewayQuery(key), {}) for key in homes} == homes
    assert min(Counter(homes.values()).values()) > 60


def test_when_a_gateway_goes_only_its_own_keys_move() -> None:
    before, after = of(4), of(3)
    for key in keys(200):
        home = first(before, GatewayQuery(key), {})
        if home != "g3":
            assert first(after, GatewayQuery(key), {}) == home


def test_no_gateway_gets_more_than_a_quarter_above_its_share() -> None:
    """All requests have the same key, as completions with the same first block do."""
    ranking, loads = of(4), Counter[str]()
    for _ in range(400):
        loads[ranking.rank(GatewayQuery(b"one"), loads.__getitem__)[0].address] += 1
    assert max(loads.values()) <= 1.25 * 100 + 1


def test_the_region_of_the_plan_comes_before_everything_else() -> None:
    ranking = of(4, "eu", "us")
    loads = {"10.0.0.0:80": 50, "10.0.0.2:80": 60}
    for key in (b"", *keys(20)):
        ranked = ranking.rank(GatewayQuery(key, "eu"), lambda a: loads.get(a, 0))
        assert {g.id for g in ranked[:2]} == {"g0", "g2"}
        assert {g.id for g in ranked[2:]} == {"g1", "g3"}


def test_a_gateway_without_a_region_is_near_to_all() -> None:
    ranking = of(2, "", "us")
    assert first(ranking, GatewayQuery(region="eu"), {"10.0.0.0:80": 9}) == "g0"


@pytest.mark.parametrize(
    ("only", "expected"), [(None, 3), (["10.0.0.1:80"], 1), (["10.0.0.9:80"], 0), ([], 0)]
)
def test_only_allowed_addresses_are_named(only: list[str] | None, expected: int) -> None:
    assert len(of(3).rank(GatewayQuery(b"k", only=only), lambda _: 0)) == expected
