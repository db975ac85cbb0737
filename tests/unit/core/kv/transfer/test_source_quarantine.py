"""When a source is held, and for how long."""

from __future__ import annotations

import pytest

from pdmesh.core.kv.transfer.source_quarantine import Quarantine


@pytest.mark.fault("F34")
def test_the_third_corruption_within_the_window_quarantines_a_source_for_a_while() -> None:
    quarantine: Quarantine[str] = Quarantine(limit=3, window_s=60, hold_s=30)
    assert [quarantine.record("p0", now) for now in (0.0, 61.0, 62.0)] == [False] * 3
    assert not quarantine.record("p1", 63.0), "another source"
    assert quarantine.record("p0", 63.0)
    assert not quarantine.record("p0", 64.0), "told once"
    assert quarantine.is_held("p0", 92.9)
    assert not quarantine.is_held("p1", 92.9)
    assert not quarantine.is_held("p0", 93.0)
    assert quarantine.release_due(92.9) == []
    assert quarantine.release_due(93.0) == ["p0"]
    assert [quarantine.record("p0", now) for now in (94.0, 95.0)] == [False, False]
    quarantine.check_invariants()
