"""A leader stops by itself when its lease may have ended, and epochs only grow.

An epoch is the number of a leadership. Processes refuse orders of an older epoch.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from pdmesh.core.control.leadership import FORGET_EPOCH_S, EpochFence, Leadership
from pdmesh.net.nats.leader import LeaderElection
from tests.fakes.kv.memory_kv import MemoryBucket
from tests.support.waiting import until


@pytest.mark.fault("F12", "F13")
def test_a_leader_that_cannot_renew_stops_at_two_thirds_of_its_lease() -> None:
    state = Leadership(lease_s=3.0)
    state.won(revision=10, asked_at=0.0)
    assert state.is_leader(1.9)
    assert not state.is_leader(2.1)  # even without a tick, because a paused process gets none
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
def test_epochs_grow_even_if_a_wiped_store_counts_from_one_again() -> None:
    state = Leadership(lease_s=3.0)
    assert state.won(revision=100, asked_at=0.0) == 100
    state.lost()
    assert state.won(revision=1, asked_at=5.0) == 101
    other = Leadership(lease_s=3.0)
    other.saw(101, now=9.0)
    assert other.won(revision=2, asked_at=9.0) == 102


@pytest.mark.fault("F21")
def test_after_a_wipe_a_leader_continues_above_the_epochs_of_instances() -> None:
    """The store was wiped and the master restarted. Only then did an instance's record tell the
    master of the high epochs.
    """
    state = Leadership(lease_s=3.0)
    assert state.won(revision=1, asked_at=0.0) == 1
    assert state.saw(5000, now=0.5)
    assert (state.epoch, state.is_leader(0.5)) == (5001, True)
    assert not state.saw(5001, now=0.6), "its own epoch, which an instance repeats"
    assert not state.saw(4999, now=0.6)
    assert state.epoch == 5001


@pytest.mark.fault("F21")
def test_a_standby_does_not_take_a_lease_that_a_wiped_store_has_forgotten() -> None:
    """The leader notices the wipe only at its next renewal. If the standby could lead before then,
    the two masters would outbid each other's epochs again and again.
    """
    state = Leadership(lease_s=3.0)
    assert state.may_win(0.0), "no leader was ever heard of"
    state.other_holds(now=1.0)
    assert not state.may_win(3.9)
    assert state.may_win(4.0)
    state.other_holds(now=5.0)
    state.vacated()
    assert state.may_win(5.0), "the lease was released, or the store ended it"


@pytest.mark.fault("F12")
def test_a_leader_whose_lease_may_have_ended_only_remembers_a_newer_epoch() -> None:
    state = Leadership(lease_s=3.0)
    state.won(revision=5, asked_at=0.0)
    assert not state.saw(6, now=2.1), "its lease is in doubt, and no tick came yet"
    assert (state.epoch, state.is_leader(2.1)) == (6, False)


@pytest.mark.fault("F12", "F13")
def test_an_older_epoch_is_refused_while_a_newer_one_is_heard() -> None:
    fence = EpochFence()
    assert fence.admit(5, now=0.0)
    assert not fence.admit(4, now=FORGET_EPOCH_S - 1)
    assert fence.admit(5, now=FORGET_EPOCH_S - 1)
    assert not fence.admit(4, now=2 * FORGET_EPOCH_S - 2)
    assert fence.admit(6, now=2 * FORGET_EPOCH_S - 2)


@pytest.mark.fault("F21")
def test_a_store_that_counts_from_one_again_does_not_shut_its_masters_out_for_ever() -> None:
    """NATS lost its store, and the masters were restarted. So no master knows the high epoch."""
    fence = EpochFence()
    assert fence.admit(90_000, now=0.0)
    assert not fence.admit(1, now=3.0)
    assert fence.admit(1, now=FORGET_EPOCH_S)
    assert fence.admit(2, now=FORGET_EPOCH_S)


class SlowBucket(MemoryBucket):
    """Stores every write, but from the second one on never answers."""

    async def put(self, key: str, value: bytes, last: int | None = None) -> int:
        revision = await super().put(key, value, last)
        if revision > 1:
            await asyncio.Event().wait()
        return revision


@pytest.mark.fault("F11")
async def test_a_leader_that_stops_in_the_middle_of_a_renewal_gives_its_lease_up() -> None:
    """A bug once: the unanswered renewal had changed the lease's revision, so the release failed.
    The standby then waited for the whole lease.
    """
    server: Any = SimpleNamespace(jetstream=lambda _: None)
    election = LeaderElection(server, "master", "a", 1, 30.0, lambda *_: None)
    bucket = SlowBucket()
    bucket.come_back()
    election._bucket = bucket  # type: ignore[assignment]  # a fake
    election.start()
    await until(lambda: election.is_leader)
    bucket.watches[0].open()  # opening the watch causes a renewal at once
    await until(lambda: bucket.revision == 2)
    await election.stop()
    assert bucket.entries["master"].value is None
    assert election.num_won == 1
