"""The recent events of the mesh, with a bound for each kind."""

from __future__ import annotations

from pdmesh.core.history.recent_events import MAX_OF_A_KIND, RecentEvents


def test_the_same_thing_again_is_counted_and_later_it_is_a_new_one() -> None:
    events = RecentEvents()
    for at in (0.0, 30.0, 80.0, 200.0):
        events.add("error", "d-0", "KV_TRANSFER_FAILED: slow", at)
    assert [(e.at, e.count) for e in events.latest()] == [(80.0, 3), (200.0, 1)]


def test_a_flood_of_errors_does_not_push_out_a_change() -> None:
    events = RecentEvents()
    events.add("change", "d-0", "CordonInstance by ann", 0.0)
    for number in range(10 * MAX_OF_A_KIND):
        events.add("error", f"d-{number}", "ENGINE_DIED: x", float(number))
    latest = events.latest()
    assert len(latest) == MAX_OF_A_KIND + 1
    assert latest[0].kind == "change"
    assert [e.at for e in latest] == sorted(e.at for e in latest)
