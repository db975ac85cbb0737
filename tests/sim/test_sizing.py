"""Plans for the size of a deployment agree with the virtual mesh, in short runs.

The virtual mesh has the same cores as the real one.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from loadtests.sizing import played
from loadtests.sizing.scenes import SCENES, Scene
from pdmesh.core.sizing.deployment import Deployment
from pdmesh.core.sizing.search import Workload, smallest_fusion, smallest_pair

MIXED = SCENES[0]
LONG = next(scene for scene in SCENES if scene.name == "long prompts")


def planned(scene: Scene, rate_per_s: float, search: object) -> tuple[Deployment, Workload]:
    wanted = scene.wanted(rate_per_s)
    found = search(wanted)  # type: ignore[operator]
    assert isinstance(found, Deployment)
    return found, wanted


@pytest.mark.parametrize("search", [smallest_pair, smallest_fusion])
@pytest.mark.parametrize(("scene", "rate"), [(MIXED, 100.0), (LONG, 6.0)])
def test_the_mesh_sees_the_times_of_the_plan(
    scene: Scene, rate: float, search: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(played, "NUM_REQUESTS", 1500)
    found, wanted = planned(scene, rate, search)
    times = played.play(found, wanted, 1)
    assert found.seen.ttft_p50_s / times.ttft_p50_s == pytest.approx(1, abs=0.35)
    assert found.seen.tpot_p50_s / times.tpot_p50_s == pytest.approx(1, abs=0.25)
    assert found.seen.ttft_s / times.ttft_s == pytest.approx(1, abs=0.6)
    assert found.seen.tpot_s / times.tpot_s == pytest.approx(1, abs=0.4)
    assert times.kept > 0.97


@pytest.mark.parametrize("search", [smallest_pair, smallest_fusion])
def test_twice_the_planned_load_breaks_the_goals(
    search: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the mesh kept the goals, the plan would be twice as large as needed."""
    monkeypatch.setattr(played, "NUM_REQUESTS", 1000)
    found, wanted = planned(LONG, 6.0, search)
    assert not played.keeps(found, wanted.at(12.0), 1)


def test_the_cached_share_is_found_on_the_mesh() -> None:
    agents = next(scene for scene in SCENES if scene.cached_share > 0.5)
    wanted = agents.wanted(2.0)
    traffic = replace(wanted.traffic, requests=wanted.traffic.requests[:100])
    shared = [len(a.blocks) * 64 for a in played.arrivals(traffic, 200, 1)]
    lengths = [a.num_prompt_tokens for a in played.arrivals(traffic, 200, 1)]
    assert sum(shared) / sum(lengths) == pytest.approx(traffic.cached_share, rel=0.1)
