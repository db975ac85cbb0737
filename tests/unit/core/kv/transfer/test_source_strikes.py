"""When a source is excluded, and for how long."""

from __future__ import annotations

import pytest

from pdmesh.core.kv.transfer.source_strikes import SourceStrikes


@pytest.mark.fault("F34")
def test_the_third_corruption_within_the_window_excludes_a_source_for_a_while() -> None:
    strikes: SourceStrikes[str] = SourceStrikes(limit=3, window_s=60, excluded_s=30)
    assert [strikes.record("p0", now) for now in (0.0, 61.0, 62.0)] == [False] * 3
    assert not strikes.record("p1", 63.0), "another source"
    assert strikes.record("p0", 63.0)
    assert not strikes.record("p0", 64.0), "it is reported once"
    assert strikes.is_excluded("p0", 92.9)
    assert not strikes.is_excluded("p1", 92.9)
    assert not strikes.is_excluded("p0", 93.0)
    assert strikes.release_due(92.9) == []
    assert strikes.release_due(93.0) == ["p0"]
    assert [strikes.record("p0", now) for now in (94.0, 95.0)] == [False, False]
    strikes.check_invariants()
