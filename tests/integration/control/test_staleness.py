"""What instances publish of themselves is known to the master at once, and all of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtests.placement.staleness import measure


@pytest.mark.req("S100")
async def test_every_change_gets_there_and_none_waits_for_a_poll(tmp_path: Path) -> None:
    """How soon is the benchmark's to say.

    Here a lost event shows, and a change that waits for the report of once a second: then those
    would be all there are.
    """
    num_instances = 10
    found = await measure(num_instances, rate=100.0, duration_s=2.0, folder=tmp_path)
    assert found.num_lost == 0
    assert found.events_per_s > 3 * num_instances
    assert found.events_per_s <= 2 * found.changes_per_s + 10 + 5, (
        "loads, blocks, and each load once a second"
    )
