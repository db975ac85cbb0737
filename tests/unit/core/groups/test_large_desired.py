"""A large desired state: it is read beside the loop, and nobody looks at all groups for each
scenario.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping
from dataclasses import replace
from typing import TypeVar

import httpx
import pytest
import yaml
from starlette.applications import Starlette

from pdmesh.core.groups.desired import (
    Desired,
    Group,
    Scenario,
    problems,
)
from pdmesh.core.groups.facts import Observed, Seen, wanted_of
from pdmesh.core.groups.revisions import with_canaries
from pdmesh.core.groups.round import Round
from pdmesh.core.model import (
    Assignment,
    Phase,
    Role,
    RoleSpec,
    Stage,
)
from pdmesh.core.upgrade.controller import UpgradeController
from pdmesh.core.upgrade.events import KeepRecord
from pdmesh.core.upgrade.observation import Surroundings, observe
from pdmesh.desired_file import MAX_BYTES, MAX_EVENTS, read
from pdmesh.errors import InvalidRequest, Overloaded
from pdmesh.services.master_scheduler.admin.page_routes import page_routes
from pdmesh.services.master_scheduler.groups.desired_reader import MAX_WAITING
from pdmesh.v1 import admin_service_pb2 as pb
from tests.support.sites.master_site import CHAT, Site

NUM = 2500
LARGE = "scenarios:\n  chat: {allow_single: true}\ngroups:\n" + "".join(
    f"  g{i}: {{scenario: chat, prefill: 2, decode: 2, region: eu, failover: [us], racks: [r1]}}\n"
    for i in range(NUM)
)
LARGE += "regions: [eu, us]\n"
MIN_TURNS = 5  # a loop that is held turns once or twice

T = TypeVar("T")


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    site = Site()
    await site.apply(CHAT)
    await site.start()
    await site.loop.round()
    yield site
    await site.close()


class Turns:
    """How often the loop woke somebody who sleeps for a moment, during each piece of work."""

    def __init__(self) -> None:
        self.num: dict[str, int] = {}

    async def during(self, name: str, work: Awaitable[T]) -> T:
        self.num[name] = 0
        turning = asyncio.create_task(self._turn(name))
        try:
            return await work
        finally:
            turning.cancel()

    async def _turn(self, name: str) -> None:
        while True:
            await asyncio.sleep(0.001)
            self.num[name] += 1


async def test_the_loop_turns_while_a_large_file_is_compared_applied_and_read(
    site: Site,
) -> None:
    """4,096 groups took 4 s on the loop, and the leader lost its lease."""
    turns = Turns()
    diff_request, apply_request = (
        pb.DiffDesiredRequest(text=LARGE),
        pb.ApplyDesiredRequest(text=LARGE),
    )
    diff = await turns.during("diff", site.ask("DiffDesired", diff_request))
    assert len(diff.changes) > NUM
    await turns.during("apply", site.ask("ApplyDesired", apply_request))
    assert site.loop.current is None  # not read yet: nobody acts on what was before
    await turns.during("read", site.loop.round())
    assert site.loop.current is not None
    assert len(site.loop.current[0].groups) == NUM
    assert all(num >= MIN_TURNS for num in turns.num.values()), turns.num


async def test_the_loop_turns_while_the_page_reads_and_writes_what_is_long(site: Site) -> None:
    app = Starlette(routes=page_routes(site.admin, has_token=False))
    transport = httpx.ASGITransport(app, client=("127.0.0.1", 1))
    headers = {"content-type": "application/json"}
    text = json.dumps({"text": LARGE})
    turns = Turns()
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:9") as client:
        asking = client.post("/admin/DiffDesired", content=text, headers=headers)
        answer = await turns.during("page", asking)
    assert len(answer.json()["changes"]) > NUM
    assert turns.num["page"] >= MIN_TURNS


async def test_few_texts_are_worked_on_at_once_and_the_next_ones_are_refused(site: Site) -> None:
    request = pb.DiffDesiredRequest(text=CHAT)
    asked = [asyncio.create_task(site.ask("DiffDesired", request)) for _ in range(MAX_WAITING + 3)]
    answers = await asyncio.gather(*asked, return_exceptions=True)
    assert Counter(type(answer) for answer in answers) == {
        pb.DiffDesiredResponse: MAX_WAITING,
        Overloaded: 3,
    }


def test_of_too_long_a_list_no_more_is_parsed_than_the_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A megabyte of list took 15 s and the master with it."""
    num_parsed = 0
    parse = yaml.parse

    def counted(*args: object, **kwargs: object) -> Iterator[object]:
        nonlocal num_parsed
        for event in parse(*args, **kwargs):
            num_parsed += 1
            yield event

    monkeypatch.setattr(yaml, "parse", counted)
    with pytest.raises(InvalidRequest, match="more than"):
        read("- a\n" * (MAX_BYTES // 4))
    assert num_parsed == MAX_EVENTS + 1


class Counting(dict[str, Group]):
    """Says how many of its values were looked at."""

    num_looks = 0

    def __iter__(self) -> Iterator[str]:
        for key in super().__iter__():
            self.num_looks += 1
            yield key

    def values(self) -> Iterator[Group]:  # type: ignore[override]  # as much of a view as is used
        return (self[key] for key in self)

    def items(self) -> Iterator[tuple[str, Group]]:  # type: ignore[override]  # as above
        return ((key, self[key]) for key in self)


def test_each_group_is_looked_at_a_few_times_however_many_scenarios_there_are() -> None:
    num = 300
    groups = Counting({f"g{i}": Group(f"s{i}", 2, 2) for i in range(num)})
    scenarios: Mapping[str, Scenario] = {f"s{i}": Scenario() for i in range(num)}
    desired = Desired(scenarios=scenarios, groups=groups)
    assert list(problems(desired)) == []
    wanted = wanted_of(desired, "ucx/1")
    observed = Observed(1, 1, wanted, {}, {})
    look = observe(desired, desired, {}, observed, {}, Surroundings(lambda group_id, role: None))
    kept = UpgradeController("ucx/1").handle(look, 0.0)
    assert len(kept) == num
    upgrades = [effect.upgrade for effect in kept if isinstance(effect, KeepRecord)]
    tried = {each.scenario: replace(each, canary_share=0.5) for each in upgrades}
    assert len(with_canaries(desired, tried).groups) == 2 * num
    assert groups.num_looks < 30 * num


class CountingPlan(dict[str, Assignment]):
    """Says how many of its instances were looked at by going over it."""

    num_looks = 0

    def __iter__(self) -> Iterator[str]:
        for key in super().__iter__():
            self.num_looks += 1
            yield key

    def items(self) -> Iterator[tuple[str, Assignment]]:  # type: ignore[override]  # as above
        return ((key, self[key]) for key in self)


def test_each_instance_is_looked_at_once_for_the_members_of_all_groups() -> None:
    num = 200
    given = {
        f"i{i}": Assignment(1, 1, i, Stage.SERVE, RoleSpec(Role.DECODE, f"g{i % 50}", "s", ""))
        for i in range(num)
    }
    seen = {i: Seen(i, 1, Phase.READY) for i in [*given, "new"]}
    round_ = Round(Observed(1, 1, wanted_of(Desired(), "ucx/1"), seen, given))
    round_.plan = plan = CountingPlan(round_.plan)
    groups = [round_.members(f"g{i}") for i in range(50)]
    assert sum(map(len, groups)) == num
    assert all(g == sorted(g, key=lambda m: m.instance_id) for g in groups)
    round_.plan["new"] = replace(given["i7"], stage=Stage.LOAD)
    assert [m.instance_id for m in round_.members("g7")] == ["i107", "i157", "i57", "i7", "new"]
    assert plan.num_looks <= 2 * num + 1


def test_blanks_are_found_once_for_all_groups_that_ask_in_vain() -> None:
    round_ = Round(Observed(1, 1, wanted_of(Desired(), "ucx/1"), {}, {}))
    assert round_.blanks() is round_.blanks()
    assert round_.num_blanks(("r1",)) is round_.num_blanks(("r1",))
