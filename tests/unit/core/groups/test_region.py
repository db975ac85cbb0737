"""Regions (S58): where groups are, and which region a group moves to when its region is lost or
returns.
"""

from __future__ import annotations

import pytest

from pdmesh.core.groups.adjustments import Adjustment, adjusted, num_lent
from pdmesh.core.groups.round import Round
from pdmesh.core.model import Role, Stage
from pdmesh.desired_file import read
from pdmesh.errors import InvalidRequest
from tests.fakes.group_world import LIMITS, World

HOME_AND_FAILOVER = """
regions: [eu, us]
groups:
  chat: {prefill: 2, decode: 2, region: eu, failover: [us]}
"""
SINGLE = "scenarios: {default: {allow_single: true}}\n"
ANYWHERE = "regions: [eu, us]\ngroups:\n  chat: {prefill: 2, decode: 2}\n"
SPANNING = "regions: [eu, us]\ngroups:\n  chat: {prefill: 2, decode: 2, spans_regions: true}\n"

pytestmark = pytest.mark.req("S58")


def world_of(text: str, **num: int) -> World:
    """A world with `num` instances in each region. Their ids are eu-0, us-0 and so on."""
    world = World(read(text), num=0)
    for region, count in num.items():
        for i in range(count):
            start(world, f"{region}-{i}")
    return world


def start(world: World, name: str) -> None:
    world.start(name)
    world.processes[name].region = name.partition("-")[0]
    world.tell(name)


def regions(world: World) -> set[str]:
    roles = (Role.PREFILL, Role.DECODE)
    return {name.partition("-")[0] for role in roles for name in world.ready("chat", role)}


def test_a_group_is_in_its_failover_while_its_region_lacks_room_for_all_of_it() -> None:
    world = world_of(HOME_AND_FAILOVER, eu=4, us=4)
    world.settle()
    assert (world.counts(), regions(world)) == ({"chat": (2, 2, 0)}, {"eu"})

    for i in range(4):
        world.kill(f"eu-{i}")
    world.settle()
    assert (world.counts(), regions(world)) == ({"chat": (2, 2, 0)}, {"us"})

    for i in range(3):
        start(world, f"eu-{i}")
    world.settle()
    assert regions(world) == {"us"}  # the whole group needs four instances
    world.steps.clear()
    start(world, "eu-3")
    world.settle()
    assert (world.counts(), regions(world)) == ({"chat": (2, 2, 0)}, {"eu"})
    told = [(s.step, s.instance_id[:2]) for s in world.steps if s.step in ("ready", "draining")]
    assert told == [("ready", "eu")] * 4 + [("draining", "us")] * 4


def test_a_group_stays_in_its_failover_while_its_home_has_too_few_instances() -> None:
    world = world_of(HOME_AND_FAILOVER, us=4)
    world.settle()
    for i in range(4):
        start(world, f"eu-{i}")
    for _ in range(3):
        world.work_round()
    world.kill("eu-0")
    world.settle()
    assert (world.counts(), regions(world)) == ({"chat": (2, 2, 0)}, {"us"})
    assert {i[:2] for i in world.given} == {"us"}


def test_a_group_that_may_be_anywhere_is_in_one_region_and_stays_while_it_serves() -> None:
    world = world_of(ANYWHERE, eu=3, us=5)
    world.settle()
    assert regions(world) == {"us"}
    for i in (3, 4, 5, 6):
        start(world, f"eu-{i}")
    world.kill("us-0")
    world.settle()
    assert (world.counts(), regions(world)) == ({"chat": (2, 2, 0)}, {"us"})
    for i in (1, 2, 3, 4):
        world.kill(f"us-{i}")
    world.settle()
    assert (world.counts(), regions(world)) == ({"chat": (2, 2, 0)}, {"eu"})


def test_one_crash_in_a_region_of_two_is_no_lost_region() -> None:
    """An assignment kills each instance that takes it. That is a failed set-up and no lost
    region.
    """
    text = (
        "scenarios: {default: {allow_single: true}}\ngroups:\n  chat: {prefill: 1, decode: 1, "
        "region: eu}\nregions: [eu]\n"
    )
    world = world_of(text, eu=2)
    world.round()
    for _ in range(LIMITS.max_tries):
        world.kill("eu-0")
        world.round()
        start(world, "eu-0")
        world.round()
    assert "setup_failed" in [step.step for step in world.steps], world.describe()


@pytest.mark.req("S25")
def test_a_group_changes_its_region_without_a_gap() -> None:
    text = SINGLE + HOME_AND_FAILOVER.replace(", failover: [us]", "")
    world = world_of(text, eu=4, us=3)
    world.settle()
    world.apply(read(text.replace("region: eu", "region: us")))
    world.settle()
    assert regions(world) == {"eu"}
    assert world.controller.reports["chat"].detail == "1 more blank instance needed in region us"
    start(world, "us-3")
    world.settle()
    assert (world.counts(), regions(world)) == ({"chat": (2, 2, 0)}, {"us"})


@pytest.mark.req("S13")
# After 3 rounds only the group's decodes are ready, after 20 rounds the whole group is.
@pytest.mark.parametrize("num_rounds", [3, 20])
def test_a_group_that_spanned_regions_makes_room_in_its_new_region(num_rounds: int) -> None:
    """Some of the group's instances are already in the new region, but KV of these instances may
    leave that region. So other instances must take their places.
    """
    world = world_of(SINGLE + HOME_AND_FAILOVER, eu=5, us=5)
    world.settle()
    world.apply(read(SINGLE + SPANNING.replace("prefill: 2, decode: 2", "prefill: 3, decode: 3")))
    for _ in range(num_rounds):
        world.work_round()
    assert {world.records[i].kv_region for i in world.ready("chat", Role.DECODE)} >= {""}
    world.steps.clear()
    back = HOME_AND_FAILOVER.replace("region: eu, failover: [us]", "region: us, failover: [eu]")
    world.apply(read(SINGLE + back))
    world.settle()
    assert (world.counts(), regions(world)) == ({"chat": (2, 2, 0)}, {"us"}), world.describe()
    assert {world.records[i].kv_region for i in world.given} == {"us"}
    # While room is made, no instance of another region is assigned.
    assert {s.instance_id[:2] for s in world.steps if s.step == "assigned"} == {"us"}


def test_a_group_that_is_to_span_regions_makes_room_if_no_blank_instance_is_left() -> None:
    world = world_of(SINGLE + HOME_AND_FAILOVER, eu=4, us=2)
    world.settle()
    world.apply(read(SINGLE + SPANNING))
    world.settle()
    assert (world.counts(), regions(world)) == ({"chat": (2, 2, 0)}, {"eu", "us"})
    assert {world.records[i].kv_region for i in world.given} == {""}


@pytest.mark.parametrize("where", ["", ", region: eu, failover: [us]"])
def test_a_group_whose_racks_are_in_another_region_now_goes_there(where: str) -> None:
    text = "regions: [eu, us]\ngroups:\n  chat: {prefill: 2, decode: 2, racks: [RACK]"
    world = world_of(text.replace("RACK", "r1") + where + "}\n", eu=4, us=4)
    for process in world.processes.values():
        process.rack = "r1" if process.instance_id.startswith("eu") else "r2"
        world.tell(process.instance_id)
    world.settle()
    assert regions(world) == {"eu"}
    world.apply(read(text.replace("RACK", "r2") + where + "}\n"))
    world.settle()
    assert (world.counts(), regions(world)) == ({"chat": (2, 2, 0)}, {"us"}), world.describe()


def test_a_region_whose_processes_are_asked_to_stop_makes_no_room() -> None:
    world = world_of(HOME_AND_FAILOVER, eu=4, us=4)
    world.settle()
    for i in range(4):
        world.stop(f"eu-{i}")
    world.work_round()
    given = {i[:2] for i, each in world.given.items() if each.stage < Stage.DRAIN}
    assert given == {"us"}, world.describe()


def test_an_instance_that_hangs_does_not_keep_its_group_from_the_failover() -> None:
    world = world_of(HOME_AND_FAILOVER, eu=4, us=4)
    world.processes["eu-0"].is_stopping = True  # this process follows no assignment
    world.settle()
    assert (world.counts(), regions(world)) == ({"chat": (2, 2, 0)}, {"us"}), world.describe()


@pytest.mark.req("S13")
def test_kv_crosses_regions_only_where_the_file_says_so() -> None:
    world = world_of(SPANNING, eu=2, us=2)
    world.settle()
    assert (world.counts(), regions(world)) == ({"chat": (2, 2, 0)}, {"eu", "us"})
    assert {r.kv_region for r in world.records.values()} == {""}

    world = world_of(ANYWHERE, eu=3, us=3)
    world.settle()
    assert world.counts() == {}
    assert world.controller.reports["chat"].detail == "1 more blank instance needed in region eu"


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ("{region: eu}", "groups.chat: scenario default would be lost with region eu"),
        ("{region: eu, failover: [eu]}", "groups.chat.failover[0]: eu is named twice"),
        ("{region: eu, failover: [asia]}", "groups.chat.failover[0]: there is no region asia"),
        ("{failover: [us]}", "groups.chat.failover: needs the field"),
        ("{region: eu, spans_regions: true}", "groups.chat.spans_regions: contradicts region eu"),
    ],
)
def test_errors_of_a_region_are_reported(group: str, message: str) -> None:
    text = f"regions: [eu, us]\ngroups:\n  chat: {{prefill: 2, decode: 2, {group[1:]}"
    with pytest.raises(InvalidRequest) as caught:
        read(text)
    assert caught.value.message.startswith(f"line 3: {message}")


@pytest.mark.req("S11")
def test_instances_kept_for_a_lent_group_are_in_its_region() -> None:
    """No other group of eu can take the kept instances. The blank instances in us stay free for the
    groups that move there when eu is lost.
    """
    text = HOME_AND_FAILOVER + "  night: {prefill: 2, decode: 2, region: eu, failover: [us]}\n"
    desired = read(text)
    world = world_of(text, eu=8, us=4)
    lent = {"night": Adjustment(2, 2, (2, 2), "training")}
    world.desired, world.num_lent = adjusted(desired, lent), num_lent(desired, lent)
    world.settle()
    assert regions(world) == {"eu"}
    assert {seen.region for seen in Round(world.observe()).blanks()} == {"us"}
    for i in range(8):
        world.kill(f"eu-{i}")
    world.settle()
    assert (world.counts(), regions(world)) == ({"chat": (2, 2, 0)}, {"us"})
