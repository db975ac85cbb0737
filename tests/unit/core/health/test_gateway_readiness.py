"""Tests which paths through instances a gateway probes, and when the gateway is ready."""

from __future__ import annotations

import pytest

from pdmesh.core.health.gateway_readiness import MAX_REFUSALS, GatewayReadiness, probed_paths

FULL, BROKEN = ("p0", "d0"), ("p1", "d1")


def test_paths_are_all_compatible_pairs_and_neighbours_share_no_instance() -> None:
    two = {"p0": "g", "p1": "g"}, {"d0": "g", "d1": "g"}
    assert probed_paths(*two, []) == [("p0", "d0"), ("p1", "d1"), ("p0", "d1"), ("p1", "d0")]
    assert probed_paths({"p0": "g"}, {"x": "other", "d1": "g"}, []) == [("p0", "d1")]


def test_without_a_pair_each_instance_does_both_phases() -> None:
    assert probed_paths({"p0": "g", "p1": "g"}, {}, []) == [("p0", ""), ("p1", "")]
    assert probed_paths({}, {"d0": "g"}, []) == [("d0", "")]
    assert probed_paths({"p0": "g"}, {"d0": "g"}, ["f"]) == [("p0", "d0"), ("f", "")]
    assert probed_paths({}, {}, []) == []


def test_one_path_that_passes_is_enough_and_later_faults_change_nothing() -> None:
    gateway = GatewayReadiness()
    assert [gateway.next([FULL, BROKEN]) for _ in range(3)] == [FULL, BROKEN, FULL]
    gateway.failed(FULL)
    assert not gateway.is_ready
    gateway.passed()
    gateway.failed(FULL)
    assert gateway.is_ready


def test_a_mesh_that_refuses_because_it_is_full_counts_as_working() -> None:
    gateway = GatewayReadiness()
    for _ in range(MAX_REFUSALS - 1):
        gateway.refused(FULL)
    assert not gateway.is_ready
    gateway.refused(FULL)
    assert gateway.is_ready


@pytest.mark.parametrize("failed", [FULL, BROKEN])
def test_a_failed_path_cancels_only_its_own_refusals(failed: tuple[str, str]) -> None:
    gateway = GatewayReadiness()
    for _ in range(5):
        gateway.refused(FULL)
    gateway.failed(failed)
    assert gateway.num_refusals == (0 if failed == FULL else 5)
