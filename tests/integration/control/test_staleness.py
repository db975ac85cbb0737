"""Tests how soon the master knows the load and the KV blocks that instances publish."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtests.placement.staleness import measure


@pytest.mark.req("S100")
async def test_a_change_is_known_as_soon_as_with_polls_every_20_and_50_ms(
    tmp_path: Path,
) -> None:
    """The same instances report the same changes by events and by polls, and the test compares the
    delays.

    The benchmark loadtests.placement.staleness reports the delays in milliseconds.
    """
    found = await measure(num_instances=10, rate=200.0, duration_s=3.0, folder=tmp_path)
    assert found.num_lost == 0
    assert found.load_to_polled < 1.5
    assert found.blocks_to_polled < 1.5
    assert found.events_per_s <= 2 * found.changes_per_s + 10 + 5, (
        "loads, blocks, and each load once a second"
    )
