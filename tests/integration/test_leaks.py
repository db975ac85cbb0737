"""A small run of the leak test that `make leak-test` runs with 100,000 requests."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtests.leak import leak_mesh, leak_test


@pytest.mark.req("S52")
@pytest.mark.fault("F2", "F6", "F27")
@pytest.mark.timeout(300)
async def test_nothing_is_left_after_disconnects_and_kills(tmp_path: Path) -> None:
    async with leak_mesh(tmp_path) as mesh:
        report = await leak_test(mesh, count=1500, concurrency=24, kill_every_s=2.0, seed=3)
    assert report.leaks == []
    assert report.num_kills >= 1
    assert report.num_given_up > 300
    assert report.outcomes["done"] > 500
    assert not report.outcomes.keys() & {"hung", "refused"}
