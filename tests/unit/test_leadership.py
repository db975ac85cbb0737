"""Leadership: self-fencing and epochs that only grow."""

from __future__ import annotations

import pytest

from pdmesh.core.leadership import Leadership


@pytest.mark.fault("F12", "F13")
def test_a_leader_that_cannot_renew_stops_at_two_thirds_of_its_lease() -> None:
    state = Leadership(lease_s=3.0)
    state.won(revision=10, asked_at=0.0)
    assert state.is_leader(1.9)
    assert not state.is_leader(2.1)  # also before any tick: a paused process wakes up as none
    assert state.tick(2.1)
    assert not state.tick(2.2)


def test_a_renewal_counts_from_when_it_was_asked_and_never_backwards() -> None:
    state = Leadership(lease_s=3.0)
    state.won(revision=10, asked_at=0.0)
    state.renewed(asked_at=1.0)
    state.renewed(asked_at=0.5)
    assert state.is_leader(2.9)
    assert not state.is_leader(3.1)


@pytest.mark.fault("F21")
def test_epochs_grow_although_the_store_was_wiped_and_counts_anew() -> None:
    state = Leadership(lease_s=3.0)
    assert state.won(revision=100, asked_at=0.0) == 100
    state.lost()
    assert state.won(revision=1, asked_at=5.0) == 101
    other = Leadership(lease_s=3.0)
    other.saw(101)
    assert other.won(revision=2, asked_at=9.0) == 102


def test_what_a_leader_hears_of_others_does_not_change_its_own_epoch() -> None:
    state = Leadership(lease_s=3.0)
    state.won(revision=5, asked_at=0.0)
    state.saw(50)
    assert state.epoch == 5
