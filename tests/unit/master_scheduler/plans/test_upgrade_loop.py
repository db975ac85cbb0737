"""The shell of upgrades writes a record before it acts.

It restores the previous version of the desired state, and applies and promotes canaries.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from google.protobuf.json_format import MessageToJson

from pdmesh.core.groups.desired import Service, revision_of
from pdmesh.core.model import Role
from pdmesh.core.placement.fleet import Fleet, InstanceRecorded
from pdmesh.core.placement.instance import Identity
from pdmesh.core.upgrade.events import RestoreVersion
from pdmesh.core.upgrade.revision_health import LegFailureReported, RequestAnswered
from pdmesh.errors import InvalidRequest, NotLeader, VersionConflict
from pdmesh.events.v1.events_pb2 import ErrorReported, Header
from pdmesh.net.bus import Message
from pdmesh.net.event_json import to_json
from pdmesh.services.master_scheduler.groups.cluster_view import KV_TRANSPORT
from pdmesh.services.master_scheduler.groups.upgrade_convert import upgrades_from, upgrades_to
from pdmesh.services.master_scheduler.placement.scenario_feed import RequestFinishedJson
from pdmesh.services.master_scheduler.plans.upgrade_feed import UpgradeFeed
from pdmesh.v1 import admin_service_pb2 as pb
from pdmesh.v1.common_pb2 import ROLE_DECODE, ROLE_PREFILL
from tests.fakes.memory_bus import MemoryBus
from tests.support.sites.master_site import Site


def text(release: str, **more: str) -> str:
    options = "".join(f", {name}: {value}" for name, value in more.items())
    return f"""
services:
  model: {{release: "{release}"{options}}}
scenarios:
  default: {{service: model, allow_single: true}}
groups:
  chat: {{prefill: 1, decode: 1}}
"""


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    """A site whose instances serve release 1, according to their records."""
    site = Site()
    site.add("p-0", ROLE_PREFILL, "chat")
    site.add("d-0", ROLE_DECODE, "chat")
    for record in site.registry.records.values():
        record.revision = revision_of(Service(release="1"), KV_TRANSPORT)
    await site.apply(text("1"))
    await site.start()
    for _ in range(2):
        await site.loop.round()
        await site.upgrades.round()
    yield site
    await site.close()


@pytest.mark.req("S24")
async def test_a_new_version_reaches_no_group_before_its_turn_and_survives_the_leader(
    site: Site,
) -> None:
    """There is no blank instance for a successor, and neither of the two instances may leave. So
    the upgrade waits, whoever leads.
    """
    await site.apply(text("2"))
    for epoch in (1, 2):
        if epoch == 2:
            await site.start()
            site.leadership = (True, 2)
        await site.loop.round()
        await site.upgrades.round()
        await site.loop.round()
        assert site.loop.observed is not None
        running = site.loop.observed.wanted.groups["chat"]
        assert {r.revision for r in site.registry.records.values()} == {running.revision}
        states = await site.ask("ListGroupStates", pb.ListGroupStatesRequest())
        (state,) = states.upgrades
        assert (state.scenario, state.version, state.state) == ("default", 2, "waiting")
        assert "2 more blank instances are needed" in state.detail


@pytest.mark.req("S24")
async def test_the_previous_version_is_restored_unless_an_operator_applied_another(
    site: Site,
) -> None:
    await site.apply(text("2"))
    restore = RestoreVersion(1, 2, "version 2: chat: 10.0% of its requests failed")
    await site.upgrades._restore(restore)
    current = await site.store.version()
    assert current is not None
    assert (current.version, current.text, current.reason) == (3, text("1"), restore.reason)
    await site.apply(text("3"))
    with pytest.raises(Exception, match="version 4 is current"):
        await site.upgrades._restore(RestoreVersion(1, 3, ""))


@pytest.mark.req("S24")
@pytest.mark.fault("F20", "F21")
@pytest.mark.parametrize("is_kept", [False, True])
async def test_a_version_that_cannot_be_restored_is_requested_only_once(
    site: Site, is_kept: bool
) -> None:
    """Either the bucket was wiped and has only the current version, or this release cannot read the
    earlier version's text.
    """
    await site.ask("ApplyDesired", pb.ApplyDesiredRequest(text=text("2"), canary_share=0.1))
    if is_kept:
        unreadable = text("1") + "of_a_later_release: 1\n"
        found = pb.DesiredVersion(version=1, text=unreadable)
        await site.desired_bucket.put("v1", MessageToJson(found).encode())
    else:
        await site.desired_bucket.delete("v1")
    for number in range(6):
        if number == 3:
            for _ in range(3):
                bad = ("canary-default", revision_of(Service(release="2"), KV_TRANSPORT))
                site.upgrades.tell(LegFailureReported(bad))
        await site.loop.round()
        await site.upgrades.round()
    assert site.upgrades._lost_versions == {1}
    assert site.view.version is not None
    assert site.view.version.version == 2
    assert site.view.upgrades["default"].back


@pytest.mark.req("S24")
@pytest.mark.fault("F12")
async def test_a_record_that_another_leader_wrote_meanwhile_is_not_overwritten(site: Site) -> None:
    """For a moment there are two leaders. The later record is kept, and the decision based on the
    older one must be made again.
    """
    await site.apply(text("2"))
    await site.loop.round()
    late = site.desired_bucket.watches[-1]
    assert late._key == "upgrades"
    late.is_live = False  # this leader's view is old
    others = upgrades_to(site.view.upgrades, epoch=1)
    others.upgrades[0].outcome = "of the other one"
    await site.desired_bucket.put("upgrades", MessageToJson(others).encode())
    with pytest.raises(VersionConflict):
        await site.view.desired.keep_upgrades(upgrades_to(site.view.upgrades, 1))
    late.open()
    assert site.view.upgrades["default"].outcome == "of the other one"
    await site.view.desired.keep_upgrades(others)
    others.epoch = 0
    with pytest.raises(NotLeader):
        await site.view.desired.keep_upgrades(others)


@pytest.mark.req("S24")
async def test_a_canary_without_a_change_is_refused(site: Site) -> None:
    async def apply(text: str, share: float) -> object:
        return await site.ask("ApplyDesired", pb.ApplyDesiredRequest(text=text, canary_share=share))

    with pytest.raises(InvalidRequest, match="more than 0 and less than 1"):
        await apply(text("2"), 1.5)
    with pytest.raises(InvalidRequest, match="no running service changes"):
        await apply(text("1") + "  more: {prefill: 1, decode: 1}\n", 0.1)
    with pytest.raises(InvalidRequest, match="no canary of any scenario"):
        await site.ask("PromoteUpgrade", pb.PromoteUpgradeRequest())
    await apply(text("2"), 0.1)
    await site.loop.round()
    await site.upgrades.round()
    assert site.shares == {"canary-default": 0.1}
    with pytest.raises(InvalidRequest, match="under way"):
        await apply(text("3"), 0.1)
    promoted = await site.ask("PromoteUpgrade", pb.PromoteUpgradeRequest())
    assert promoted.scenarios == ["default"]
    assert not site.view.upgrades["default"].canary_share


@pytest.mark.req("S24")
async def test_a_canary_that_is_being_rolled_back_is_not_promoted(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operator promotes the canary while the store writes that the canary is bad. The promotion
    must not undo that.
    """
    await site.ask("ApplyDesired", pb.ApplyDesiredRequest(text=text("2"), canary_share=0.1))
    for _ in range(3):
        await site.loop.round()
        await site.upgrades.round()
    bad = ("canary-default", revision_of(Service(release="2"), KV_TRANSPORT))
    for _ in range(3):
        site.upgrades.tell(LegFailureReported(bad))
    keep = site.store.keep_upgrades

    async def keep_slowly(upgrades: pb.Upgrades, last: int) -> int:
        await asyncio.sleep(0)
        return await keep(upgrades, last)

    monkeypatch.setattr(site.store, "keep_upgrades", keep_slowly)
    _, promoted = await asyncio.gather(site.upgrades.round(), site.upgrades.promote("default"))
    assert promoted == {}
    assert "requests failed" in site.view.upgrades["default"].back


async def test_a_record_survives_being_stored(site: Site) -> None:
    await site.apply(text("2", options="{num_slots: 4}", role_options="{decode: {num_slots: 8}}"))
    await site.loop.round()
    await site.upgrades.round()
    known = site.view.upgrades
    assert known["default"].target.role_options[Role.DECODE] == {"num_slots": "8"}
    assert upgrades_from(upgrades_to(known, 1)) == known


async def test_times_and_failures_of_requests_are_reported_by_group_and_revision() -> None:
    fleet, told = Fleet(), list[object]()
    identity = Identity(
        "p-0", 1, Role.PREFILL, "chat", "chat", "m", "f", 64, 8, 100, 4096, revision="r"
    )
    fleet.handle(InstanceRecorded(identity), 0.0)
    feed = UpgradeFeed(fleet, MemoryBus(), told.append)
    done = RequestFinishedJson(prefill_id="p-0", queue_ms=10.0, ttft_ms=110.0, e2e_ms=310.0)
    done.usage.num_completion_tokens = 11
    feed.answered(done)
    feed.answered(RequestFinishedJson(prefill_id="gone"))
    for reason, request_id in (
        ("ENGINE_FAILED", "1"),
        ("ENGINE_FAILED", ""),
        ("KV_SOURCE_RELEASED", ""),
    ):
        event = ErrorReported(
            header=Header(publisher_id="p-0"), reason=reason, request_id=request_id
        )
        await feed._on_error(Message("mesh.v1.error.reported.p-0", to_json(event), {}))
    await feed._on_error(Message("mesh.v1.error.reported.p-0", b"{", {}))
    assert told == [RequestAnswered(("chat", "r"), 0.1, 0.02), LegFailureReported(("chat", "r"))]
