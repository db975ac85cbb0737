"""The time for which each account used instances is measured (S22).

No second is lost or charged twice, whichever master leads.
"""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh.cli.view.usage_text import usage_text
from pdmesh.core.billing.accounts import Account
from pdmesh.core.billing.instance_usage import MAX_GAP_S, UsageBook, Used
from pdmesh.desired_file import read
from pdmesh.errors import InvalidRequest, Unavailable, VersionConflict
from pdmesh.net.nats.usage_store import UsageStore
from pdmesh.services.master_scheduler.usage_loop import UsageLoop
from tests.fakes.group_world import World
from tests.fakes.kv.memory_kv import MemoryBucket

pytestmark = pytest.mark.req("S22")

CHAT, NOTES = Account("s", "chat", "a"), Account("s", "notes", "b")
FILE = """
services:
  assistant: {model: m}
scenarios:
  chat: {service: assistant}
groups:
  day: {scenario: chat, prefill: 2, decode: 2}
  night: {scenario: chat, prefill: 2, decode: 1}
"""
DAY, NIGHT = Account("assistant", "chat", "day"), Account("assistant", "chat", "night")


def seconds(book: UsageBook, now: float) -> dict[Account, float]:
    book.check_invariants()
    return {each.account: each.instance_s for each in book.used(now)}


def test_each_count_holds_until_the_next_look() -> None:
    book = UsageBook()
    book.look({CHAT: 4, NOTES: 1}, now=10.0)
    book.look({CHAT: 2}, now=15.0)
    assert seconds(book, 18.0) == {CHAT: 4 * 5 + 2 * 3, NOTES: 5}
    assert seconds(book, 18.0) == {CHAT: 26, NOTES: 5}  # a query does not change the totals
    assert [u.num_instances for u in book.used(18.0)] == [2, 0]


@pytest.mark.parametrize(
    ("away_s", "charged_s"), [(4.0, 4.0), (0.0, 0.0), (-3600.0, 0.0), (1e6, MAX_GAP_S)]
)
def test_between_two_leaders_what_both_saw_is_charged(away_s: float, charged_s: float) -> None:
    book = UsageBook()
    book.resume([Used(CHAT, 100.0, 3), Used(NOTES, 7.0, 1)], away_s, {CHAT: 2}, now=50.0)
    assert seconds(book, 50.0) == {CHAT: 100 + 2 * charged_s, NOTES: 7}
    assert seconds(book, 51.0)[CHAT] == 102 + 2 * charged_s


@given(
    st.lists(
        st.tuples(st.integers(0, 30), st.integers(1, 3), st.floats(0, 100)), min_size=1, max_size=60
    )
)
def test_no_second_is_lost_at_the_bound_of_accounts(looks: list[tuple[int, int, float]]) -> None:
    book, now, expected, num = UsageBook(max_accounts=5), 0.0, 0.0, 0
    for group, count, passed_s in looks:
        now, expected, num = now + passed_s, expected + num * passed_s, count
        book.look({Account(f"s{group % 3}", f"c{group % 7}", f"g{group}"): count}, now)
        assert sum(seconds(book, now).values()) == pytest.approx(expected)
    assert len(seconds(book, now)) <= 5


class Site:
    """Stands in for a GroupReconciler, with simulated instances and a bucket in memory.

    It has only the members that the usage loop reads.
    """

    def __init__(self) -> None:
        self.world, self.bucket = World(read(FILE), num=8), MemoryBucket()
        self.world.settle()
        self.wall, self.now, self.leads = 1.7e9, 0.0, True
        self.observed = self.world.observe()
        self.loop = self.new_loop()

    @property
    def current(self) -> object:
        return self.world.desired, {}

    @property
    def view(self) -> Site:
        return self

    @property
    def version(self) -> object:
        """The number of the applied desired state."""
        return self.world.version or None

    def new_loop(self) -> UsageLoop:
        """A usage loop as in a process that has just started."""
        store = UsageStore(self.bucket)  # type: ignore[arg-type]  # a fake
        return UsageLoop(
            self,  # type: ignore[arg-type]  # has what the loop reads
            store,
            lambda: (self.leads, self.world.epoch),
            lambda: self.now,
            lambda: self.wall,
        )

    async def pass_s(self, seconds: int) -> None:
        """Let time pass second by second, with a round of the usage loop in each."""
        for _ in range(seconds):
            self.now, self.wall = self.now + 1, self.wall + 1
            self.world.now += 1
            self.observed = self.world.observe()
            await self.loop.round()

    def charged(self) -> dict[str, float]:
        return {a.group_id or a.pool: a.instance_s for a in self.loop.message().accounts}


async def test_charged_usage_outlives_leaders_and_an_outage_of_the_store() -> None:
    site = Site()
    await site.loop.round()
    await site.pass_s(20)
    assert site.charged() == {"day": 80, "night": 60, "free": 20}

    site.world.elect()
    site.loop = site.new_loop()
    with pytest.raises(Unavailable):
        site.loop.message()
    # the new leader's clock differs, and nobody led for 5 s
    site.now, site.wall = 7000.0, site.wall + 5
    site.observed = site.world.observe()
    await site.loop.round()
    assert site.charged() == {"day": 100, "night": 75, "free": 25}

    site.bucket.lose()
    with pytest.raises(Unavailable):
        await site.pass_s(11)
    site.bucket.come_back(is_wiped=True)
    with contextlib.suppress(VersionConflict):  # the loop still has a revision of the wiped bucket
        await site.pass_s(1)
    await site.pass_s(1)
    num = round((site.now - 7000) * 4)
    assert site.charged()["day"] == 100 + num
    stored = await UsageStore(site.bucket).load()  # type: ignore[arg-type]  # a fake
    assert stored is not None
    assert {a.group_id: a.instance_s for a in stored.accounts}["day"] == 100 + num


async def test_without_a_desired_state_usage_is_reported_as_not_counted() -> None:
    site = Site()
    site.world.version = 0
    with pytest.raises(InvalidRequest, match="until a desired state is applied"):
        site.loop.message()


async def test_a_master_that_stops_leading_writes_nothing_more() -> None:
    site = Site()
    await site.loop.round()
    site.leads = False
    revision = site.bucket.revision
    await site.pass_s(30)
    assert site.bucket.revision == revision
    with pytest.raises(Unavailable):
        site.loop.message()
    site.leads = True
    await site.pass_s(1)
    assert site.charged()["day"] == 4 * 31  # the same master led before, so it has lost no second


async def test_the_book_is_shown_in_seconds_and_hours() -> None:
    site = Site()
    await site.loop.round()
    await site.pass_s(900)
    lines = usage_text(site.loop.message()).splitlines()
    assert lines[0] == "used from 2023-11-14T22:13:20Z to 2023-11-14T22:28:20Z"
    assert lines[3].split() == ["assistant", "chat", "day", "-", "4", "3600.0", "1.000"]
