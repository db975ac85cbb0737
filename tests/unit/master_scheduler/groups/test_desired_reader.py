"""A large desired state is parsed in a thread, so that the event loop can do other work."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Iterator
from typing import TypeVar

import httpx
import pytest
import yaml
from starlette.applications import Starlette

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
MIN_TURNS = 5  # a blocked event loop turns once or twice

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
    """Counts the turns of the event loop during each piece of work.

    A task that sleeps for a short time counts them.
    """

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
    """With 4,096 groups, the event loop was once blocked for 4 s, and the leader lost its lease."""
    turns = Turns()
    diff_request, apply_request = (
        pb.DiffDesiredRequest(text=LARGE),
        pb.ApplyDesiredRequest(text=LARGE),
    )
    diff = await turns.during("diff", site.ask("DiffDesired", diff_request))
    assert len(diff.changes) > NUM
    await turns.during("apply", site.ask("ApplyDesired", apply_request))
    # the new version has not been read, and the earlier one must not be used
    assert site.loop.current is None
    await turns.during("read", site.loop.round())
    assert site.loop.current is not None
    assert len(site.loop.current[0].groups) == NUM
    assert all(num >= MIN_TURNS for num in turns.num.values()), turns.num


async def test_the_loop_turns_while_the_page_handles_large_texts(site: Site) -> None:
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


async def test_only_a_few_texts_are_handled_at_once_and_further_ones_are_refused(
    site: Site,
) -> None:
    request = pb.DiffDesiredRequest(text=CHAT)
    asked = [asyncio.create_task(site.ask("DiffDesired", request)) for _ in range(MAX_WAITING + 3)]
    answers = await asyncio.gather(*asked, return_exceptions=True)
    assert Counter(type(answer) for answer in answers) == {
        pb.DiffDesiredResponse: MAX_WAITING,
        Overloaded: 3,
    }


def test_a_list_that_is_too_long_is_parsed_only_up_to_the_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A list of a megabyte once took 15 s to parse, and the master died."""
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
