"""The shell of the group controller, which reads the registry and writes assignments.

The tests cover when the shell may decide, which lost data it restores, and which instances it takes
out of service.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from pdmesh.core.health.fault_levels import Level
from pdmesh.errors import InvalidRequest, NotAllowed, NotLeader, VersionConflict
from pdmesh.v1 import admin_service_pb2 as pb
from pdmesh.v1.admin_service_pb2 import LEAVE_MODE_AT_ONCE, LEAVE_MODE_DRAIN, OutOfService
from pdmesh.v1.common_pb2 import ROLE_DECODE, ROLE_PREFILL, InstanceRecord
from pdmesh.v1.groups_pb2 import STAGE_LOAD, STAGE_SERVE, Assignment
from tests.support.sites.master_site import CHAT, Caller, Site

UNREADABLE = "groups:\n  chat: {prefill: 1, decode: 1, of_a_later_release: 1}\n"


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    site = Site()
    yield site
    await site.close()


async def serving(site: Site) -> None:
    site.add("p-0", ROLE_PREFILL, "chat")
    site.add("d-0", ROLE_DECODE, "chat")
    await site.apply(CHAT)
    await site.start()
    await site.loop.round()
    assert site.stages() == {"d-0": STAGE_SERVE, "p-0": STAGE_SERVE}


@pytest.mark.fault("F20")
async def test_a_new_master_that_cannot_read_the_desired_state_changes_nothing_and_says_so(
    site: Site,
) -> None:
    """A master of another release may not know a field of the file. That must not drain the
    fleet.
    """
    await serving(site)
    await site.apply(UNREADABLE)
    site.leadership = (True, 2)
    await site.start()
    await site.loop.round()
    assert site.stages() == {"d-0": STAGE_SERVE, "p-0": STAGE_SERVE}
    assert site.loop.current is None
    states = await site.ask("ListGroupStates", pb.ListGroupStatesRequest())
    assert "of_a_later_release" in states.paused
    await site.apply(CHAT)
    await site.loop.round()
    assert not site.loop.paused


async def test_a_master_that_no_longer_leads_reports_no_groups(site: Site) -> None:
    """A master that had lost the lead once reported its last view of the groups for ever."""
    await serving(site)
    assert site.loop.controller.reports
    site.leadership = (False, 1)
    await site.loop.round()
    assert not site.loop.controller.reports
    assert site.loop.observed is None


async def test_a_text_without_groups_is_applied_only_if_the_operator_allows_it(site: Site) -> None:
    await serving(site)
    with pytest.raises(InvalidRequest, match="no earlier version to restore"):
        await site.ask("RollbackDesired", pb.RollbackDesiredRequest())
    request = pb.ApplyDesiredRequest(text="")
    with pytest.raises(InvalidRequest, match="allow-empty"):
        await site.ask("ApplyDesired", request)
    request.allow_empty = True
    assert (await site.ask("ApplyDesired", request)).version == 2
    await site.ask("RollbackDesired", pb.RollbackDesiredRequest())
    with pytest.raises(InvalidRequest, match="allow-empty"):
        await site.ask("RollbackDesired", pb.RollbackDesiredRequest(version=2))


@pytest.mark.fault("F18")
@pytest.mark.parametrize("which", ["registry", "given", "desired_bucket", "out_of_service_bucket"])
async def test_nothing_is_decided_from_a_view_that_may_be_old(site: Site, which: str) -> None:
    site.add("i-0")
    site.add("i-1")
    await site.apply(CHAT)
    await site.start()
    getattr(site, which).is_up = False
    await site.loop.round()
    assert site.loop.paused
    assert site.loop.current is None  # plans of moves wait, too
    assert not site.stages()
    getattr(site, which).is_up = True
    await site.loop.round()
    assert site.stages() == {"i-0": STAGE_LOAD, "i-1": STAGE_LOAD}


@pytest.mark.fault("F18")
async def test_without_a_desired_state_an_outage_has_no_aftereffects(site: Site) -> None:
    await site.start()
    site.out_of_service_bucket.lose()
    await site.loop.round()
    assert site.loop.paused == "the view of the instances out of service is not current"
    site.out_of_service_bucket.come_back()
    await site.loop.round()
    # the server answers again, but the bucket's entries have not been read yet
    assert site.loop.paused
    site.reopen()
    await site.loop.round()
    assert not site.loop.paused


@pytest.mark.fault("F21")
async def test_a_wiped_desired_state_and_wiped_cordons_are_written_back(site: Site) -> None:
    await serving(site)
    await site.cordon("p-0", LEAVE_MODE_AT_ONCE)
    await site.cordon("d-0", LEAVE_MODE_AT_ONCE)
    release = pb.UncordonInstanceRequest(instance_id="d-0", mode=LEAVE_MODE_AT_ONCE)
    await site.ask("UncordonInstance", release)
    before = await site.store.version()
    for bucket in (site.desired_bucket, site.out_of_service_bucket):
        bucket.come_back(is_wiped=True)
    site.reopen()
    assert site.fleet.instances["p-0"].is_out_of_service
    site.leadership = (False, 1)  # a master that does not lead writes nothing
    await site.loop.round()
    assert await site.store.version() is None
    site.leadership = (True, 2)
    await site.loop.round()
    assert await site.store.version() == before
    assert list(site.stored_out_of_service()) == ["p-0"]
    await site.start()  # the next leader knows the cordons, too
    assert site.out_of_service.left(LEAVE_MODE_AT_ONCE) == {"p-0"}


async def test_a_leaders_own_write_counts_before_the_store_reports_it(site: Site) -> None:
    """Otherwise the leader's next decision would be based on the state before its own write."""
    await site.start()
    for watch in site.desired_bucket.watches:
        watch.is_live = False  # the watch delivers entries later
    book = site.view.desired
    await book.apply(CHAT, expected_version=None, author="ann", reason="")
    await book.adjust(pb.Adjustments(epoch=1, fired={"night": 7.0}))
    await book.keep_upgrades(pb.Upgrades(epoch=1, upgrades=[pb.Upgrade(scenario="default")]))
    assert site.view.version is not None
    assert (site.view.version.version, site.view.version.text) == (1, CHAT)
    assert site.view.fired == {"night": 7.0}
    assert list(site.view.upgrades) == ["default"]
    await book.adjust(pb.Adjustments(epoch=1))  # this write follows the leader's own last write
    for watch in site.desired_bucket.watches:
        watch.open()
    assert site.view.version.text == CHAT
    assert site.view.fired == {}


async def test_data_written_after_a_wipe_is_not_overwritten_by_older_data(
    site: Site,
) -> None:
    await serving(site)
    site.desired_bucket.come_back(is_wiped=True)
    view = site.view.desired
    await site.apply(UNREADABLE)  # another process writes before the watch is open again
    view.missing.add("current")
    await view.restore()
    found = await site.store.version()
    assert found is not None
    assert found.text == UNREADABLE


@pytest.mark.fault("F20")
async def test_a_leader_that_is_voted_out_within_a_round_writes_nothing_more(site: Site) -> None:
    site.add("i-0")
    site.add("i-1")
    await site.apply(CHAT)
    await site.start()
    # The master leads at the first look, at the beginning of the round, and at the first write.
    asked = iter([(True, 1), (True, 1), (True, 1)])
    site.loop._leadership = lambda: next(asked, (False, 1))
    await site.loop.round()
    assert site.stages() == {"i-0": STAGE_LOAD}
    with pytest.raises(NotLeader):
        await site.out_of_service.take_out(
            OutOfService(instance_id="i-1", mode=LEAVE_MODE_DRAIN), epoch=0
        )
    assert not site.stored_out_of_service()


async def test_if_two_masters_change_an_entry_one_gets_an_error(site: Site) -> None:
    await serving(site)
    late = site.out_of_service_bucket.watches[0]
    late.is_live = False  # this master's view is old
    await site.out_of_service_bucket.put(
        "p-0", b'{"instanceId": "p-0", "mode": "LEAVE_MODE_AT_ONCE"}'
    )
    with pytest.raises(VersionConflict):
        await site.cordon("p-0", LEAVE_MODE_DRAIN)


async def test_a_cordoned_instance_is_not_drained_but_a_draining_one_can_be_cordoned(
    site: Site,
) -> None:
    await serving(site)
    await site.cordon("p-0", LEAVE_MODE_DRAIN)
    await site.cordon("p-0", LEAVE_MODE_AT_ONCE)
    with pytest.raises(InvalidRequest, match="uncordon it first"):
        await site.cordon("p-0", LEAVE_MODE_DRAIN)
    assert site.out_of_service.left(LEAVE_MODE_AT_ONCE) == {"p-0"}


async def test_a_worse_fault_ejects_a_draining_instance_at_once(site: Site) -> None:
    await serving(site)
    site.break_("p-0", Level.INSTANCE)
    await site.loop.round()
    assert site.out_of_service.left(LEAVE_MODE_DRAIN) == {"p-0"}
    site.break_("p-0", Level.LOST)
    await site.loop.round()
    assert site.out_of_service.left(LEAVE_MODE_AT_ONCE) == {"p-0"}
    site.break_("p-0", Level.INSTANCE)
    await site.loop.round()
    assert site.out_of_service.left(LEAVE_MODE_AT_ONCE) == {"p-0"}


async def test_an_instance_between_two_lives_can_be_cordoned(site: Site) -> None:
    await site.apply(CHAT)
    last = Assignment(instance_id="i-9", incarnation=1, epoch=1, stage=STAGE_SERVE)
    site.given.put("i-9", last, last=0)
    await site.start()
    await site.cordon("i-9", LEAVE_MODE_AT_ONCE)
    assert site.out_of_service.left(LEAVE_MODE_AT_ONCE) == {"i-9"}
    with pytest.raises(InvalidRequest, match="there is no"):
        await site.cordon("i-8", LEAVE_MODE_AT_ONCE)


async def test_only_instances_can_be_cordoned(site: Site) -> None:
    gateway = InstanceRecord(instance_id="gateway-0", incarnation=7, service="gateway")
    site.registry.records["gateway-0"] = gateway
    await site.start()
    with pytest.raises(InvalidRequest, match="gateway-0 is not an instance but a gateway"):
        await site.cordon("gateway-0", LEAVE_MODE_AT_ONCE)
    assert site.stored_out_of_service() == {}


async def test_faults_eject_at_most_a_fifth_of_the_instances_over_time(site: Site) -> None:
    """Faults may come one after another from a faulty sensor. A limit on simultaneous faults would
    never stop them.
    """
    for i in range(10):
        site.add(f"p-{i}", ROLE_PREFILL, "chat")
    await site.apply(CHAT)
    await site.start()
    # an instance that an operator cordoned does not count towards the fifth
    await site.cordon("p-9", LEAVE_MODE_AT_ONCE)
    for i in range(9):
        site.break_(f"p-{i}", Level.LOST)
        await site.loop.round()
    assert site.out_of_service.left(LEAVE_MODE_AT_ONCE) == {"p-0", "p-1", "p-9"}
    release = pb.UncordonInstanceRequest(instance_id="p-1", mode=LEAVE_MODE_AT_ONCE)
    await site.ask("UncordonInstance", release)
    site.break_("p-1", Level.WELL)
    await site.loop.round()
    assert site.out_of_service.left(LEAVE_MODE_AT_ONCE) == {"p-0", "p-2", "p-9"}


async def test_an_uncordoned_instance_is_ejected_again_only_for_new_faults(
    site: Site,
) -> None:
    site.add("p-0", ROLE_PREFILL, "chat")
    await site.apply(CHAT)
    await site.start()
    site.break_("p-0", Level.LOST, since=1.0)
    await site.loop.round()
    release = pb.UncordonInstanceRequest(instance_id="p-0", mode=LEAVE_MODE_AT_ONCE)
    answer = await site.ask("UncordonInstance", release)
    assert answer.fault == "fault level 5: ECC"
    await site.loop.round()
    assert (
        site.out_of_service.left(LEAVE_MODE_AT_ONCE) == set()
    )  # the fault judge has not heard of the release yet
    site.break_("p-0", Level.LOST, since=2.0)
    await site.loop.round()
    assert site.out_of_service.left(LEAVE_MODE_AT_ONCE) == {"p-0"}


async def test_a_drain_of_a_serving_instance_that_no_group_manages_is_refused(site: Site) -> None:
    site.add("p-0", ROLE_PREFILL, "own")
    site.add("i-0")
    await site.start()
    with pytest.raises(InvalidRequest, match="cordon it"):
        await site.cordon("p-0", LEAVE_MODE_DRAIN)
    # a drain of a blank instance is allowed, which then gets no role
    await site.cordon("i-0", LEAVE_MODE_DRAIN)
    await site.cordon("p-0", LEAVE_MODE_AT_ONCE)
    assert site.fleet.instances["p-0"].is_out_of_service


@pytest.mark.parametrize("field", ["reason", "tenant", "cache_salt", "scenario"])
async def test_the_refusal_of_a_pin_names_the_field_that_is_too_long(
    site: Site, field: str
) -> None:
    await site.start()
    request = pb.AddPinRequest(pin_id="a", **{field: "x" * 2000})  # type: ignore[arg-type]  # as the test names them
    with pytest.raises(InvalidRequest, match="at most 1024") as caught:
        await site.ask("AddPin", request)
    assert caught.value.field == field


async def test_without_a_token_only_callers_of_this_machine_are_served(site: Site) -> None:
    class Stranger(Caller):
        def peer(self) -> str:
            return "ipv4:10.0.0.9:4711"

    await site.start()
    with pytest.raises(NotAllowed):
        await site.admin.ListGroupStates(pb.ListGroupStatesRequest(), Stranger())
