"""The comparison of placement policies on families of workloads.

The constants for a family are chosen on the other families.
"""

from __future__ import annotations

import pytest

from loadtests.placement import families
from loadtests.placement.generalises import FAMILIES, play
from loadtests.placement.generalises_report import (
    Outcome,
    badness,
    chosen_without,
    dominated_by,
)
from pdmesh.core.placement.expected_completion import Prices


def outcome(policy: str, reuse: float, mean: float, p95: float = 100, p99: float = 200) -> Outcome:
    return Outcome("f", policy, 1, reuse, mean, p95, p99, 1.0, 100.0, 5.0, 20.0)


def test_the_constants_of_a_family_are_chosen_without_it() -> None:
    """The first prices are best on a and c but very bad on b. So they are chosen only if b is left
    out.
    """
    first, second = Prices(future=1.0), Prices(future=2.0)
    tried = {first: {"a": 1.0, "b": 9.0, "c": 1.0}, second: {"a": 2.0, "b": 1.0, "c": 2.0}}
    assert [chosen_without(tried, name) for name in ("a", "b", "c", "")] == [
        second,
        first,
        second,
        second,
    ]


def test_badness_grows_with_every_time_and_falls_with_reuse() -> None:
    usual = badness([outcome("default", 50, 100)])
    assert badness([outcome("default", 50, 110)]) == pytest.approx(1.1 * usual)
    assert badness([outcome("default", 50, 100, p99=220)]) == pytest.approx(1.1 * usual)
    assert badness([outcome("default", 55, 100)]) == pytest.approx(usual / 1.1)


def test_a_policy_dominates_ours_only_if_it_is_worse_in_nothing() -> None:
    by_policy = {
        "default": [outcome("default", 50, 100)],
        "equal": [outcome("equal", 50, 100)],
        "trade": [outcome("trade", 60, 110)],
        "better": [outcome("better", 50, 90)],
    }
    assert dominated_by(by_policy) == ["better"]


def test_the_tool_and_document_families_have_the_lengths_and_sharing_that_they_imitate() -> None:
    for arrivals, tokens, output, shared in (
        (families.toolagent(1, 4000), 8596, 182, 0.59),
        (families.documents(1, 4000), 15325, 149, 0.66),
    ):
        seen: set[bytes] = set()
        hits = total = 0
        for arrival in arrivals:
            run = 0
            while run < len(arrival.blocks) and arrival.blocks[run] in seen:
                run += 1
            hits += run
            total += len(arrival.blocks)
            seen.update(arrival.blocks)
        count = len(arrivals)
        assert sum(a.num_prompt_tokens for a in arrivals) / count == pytest.approx(tokens, rel=0.3)
        assert sum(a.num_output_tokens for a in arrivals) / count == pytest.approx(output, rel=0.1)
        assert hits / total == pytest.approx(shared, abs=0.2)


@pytest.mark.req("S108")
@pytest.mark.parametrize("seed", [1, 2])
def test_agents_spread_over_the_instances_and_stay_at_home(seed: int) -> None:
    """A policy that only follows prefixes sends all agents to one instance."""
    ours = play("agents, 2 instances", seed, None)
    assert ours.busiest <= 1.3
    assert ours.home_percent >= 95
    herding = play("agents, 2 instances", seed, None, "cache_threshold")
    assert herding.busiest == 2.0
    assert ours.ttft_ms_mean < herding.ttft_ms_mean


def test_every_family_without_a_trace_has_requests_of_named_blocks_in_order_of_time() -> None:
    for name, family in FAMILIES.items():
        if name.startswith(("Mooncake", "Azure")):
            continue
        arrivals = family.arrivals(None, 1)
        assert [a.at_s for a in arrivals] == sorted(a.at_s for a in arrivals)
        size = family.shape.block_size
        assert all(len(a.blocks) * size <= a.num_prompt_tokens for a in arrivals)
