"""A data-parallel domain, a set of instances called ranks, is one member of its group.

Each test is one story. The property test (`tests/property/control/test_domain_machine.py`) covers
all orders of events.
"""

from __future__ import annotations

import itertools

import pytest

from pdmesh.core.groups.desired import Desired, Group, Service
from pdmesh.core.model import DomainRank, Role, Stage
from tests.fakes.group_world import World


def of_ranks(prefill: int, decode: int, group: Group) -> Desired:
    service = Service(release="1", dp_size={Role.PREFILL: prefill, Role.DECODE: decode})
    return Desired(services={"default": service}, groups={"chat": group})


PAIR = of_ranks(2, 4, Group("default", 2, 2))  # two prefills of 2 ranks, two decodes of 4 ranks


@pytest.mark.req("S75", "S121")
def test_a_group_of_domains_is_set_up_whole_and_each_rank_knows_its_place() -> None:
    world = World(PAIR, num=12)
    world.settle()
    assert [len(ranks) for ranks in world.domains("chat", Role.PREFILL).values()] == [2, 2]
    assert [len(ranks) for ranks in world.domains("chat", Role.DECODE).values()] == [4, 4]
    assert world.controller.reports["chat"].state == "serving"
    for domain_id, ranks in world.domains("chat", Role.DECODE).items():
        places = [world.given[i].role_spec.domain for i in ranks]
        address = f"{ranks[0]}:2"
        assert places == [DomainRank(domain_id, n, 4, address) for n in range(4)]
        for i in ranks:  # each rank of a decode is a peer of each rank of each prefill
            assert len(world.processes[i].life.verified_peers) == 4


@pytest.mark.req("S15", "S121")
def test_a_group_waits_for_the_instances_of_all_its_ranks() -> None:
    world = World(PAIR, num=11)
    world.settle()
    assert world.given == {}
    assert world.controller.reports["chat"].detail == "1 more blank instance needed"


@pytest.mark.req("S35", "S121")
def test_the_death_of_a_rank_replaces_its_domain_and_no_other() -> None:
    """The engines of the other ranks would wait for the dead rank for ever. So the other ranks
    become blank and form a new domain together with a spare instance.
    """
    world = World(PAIR, num=13)
    world.settle()
    broken, whole = world.domains("chat", Role.DECODE).items()
    before = {i: p.life.incarnation for i, p in world.processes.items()}
    world.steps.clear()
    lost = broken[1][2]
    world.kill(lost)
    world.settle()
    after = world.domains("chat", Role.DECODE)
    assert whole[0] in after
    assert broken[0] not in after
    assert [len(ranks) for ranks in after.values()] == [4, 4]
    assert lost not in itertools.chain(*after.values())
    touched = {i for i, p in world.processes.items() if p.life.incarnation != before[i]}
    assert touched == set(broken[1]) - {lost}
    told = [(s.step, s.instance_id, s.detail) for s in world.steps]
    assert ("lost", broken[0], lost) in told
    (assigned,) = [s for s in world.steps if s.step == "assigned"]
    assert assigned.replaces == broken[0]
    assert [s.step for s in world.steps].count("lost") == 1


@pytest.mark.req("S28", "S31", "S121")
def test_a_domain_counts_as_one_so_its_loss_leaves_the_minimum_of_the_scenario() -> None:
    """The loss of one rank is the loss of the whole domain. So the ranks of a domain do not count
    as several instances.
    """
    world = World(PAIR, num=13)
    world.settle()
    first = world.domains("chat", Role.DECODE)
    world.to_drain.add(next(iter(first.values()))[1])
    for _ in range(60):
        world.work_round()
        assert len(world.domains("chat", Role.DECODE)) >= 1
    assert world.domains("chat", Role.DECODE) == first, "without a second domain, none leaves"
    for n in range(3):
        world.start(f"spare-{n}")
    world.settle()
    after = world.domains("chat", Role.DECODE)
    assert len(after) == 2
    assert len(after.keys() & first.keys()) == 1, "its domain left as one, with all of its ranks"


@pytest.mark.req("S26", "S121")
def test_a_domain_drains_as_one_when_one_of_its_processes_is_stopped() -> None:
    world = World(PAIR, num=16)
    world.settle()
    world.steps.clear()
    domain_id, ranks = next(iter(world.domains("chat", Role.DECODE).items()))
    world.stop(ranks[3])
    world.work_round()
    world.work_round()
    assert {world.given[i].stage for i in ranks if i in world.given} == {Stage.DRAIN}
    assert len(world.domains("chat", Role.DECODE)) == 1
    world.kill(ranks[3])
    world.settle()
    assert domain_id not in world.domains("chat", Role.DECODE)
    assert len(world.domains("chat", Role.DECODE)) == 2
    assert {s.step for s in world.steps}.isdisjoint({"lost", "failed"})


@pytest.mark.req("S15", "S121")
def test_a_rank_that_cannot_load_fails_its_domain_and_is_the_last_choice_afterwards() -> None:
    world = World(of_ranks(1, 4, Group("default", 2, 2)), num=14)
    world.round()
    sick = next(
        i for i, a in world.given.items() if (d := a.role_spec.domain) is not None and d.dp_rank
    )
    world.hear(sick)
    world.work(sick, fails=True)
    world.tell(sick)
    world.settle()
    assert [len(ranks) for ranks in world.domains("chat", Role.DECODE).values()] == [4, 4]
    assert sick not in itertools.chain(*world.domains("chat", Role.DECODE).values())
    failed = [s for s in world.steps if s.step == "failed"]
    assert [s.detail.partition(",")[0] for s in failed] == [sick]


@pytest.mark.req("S15", "S121")
@pytest.mark.parametrize("first_to_report", range(4))
def test_ranks_report_in_any_order(first_to_report: int) -> None:
    """This failed once on a real mesh: rank 1 had taken its role before rank 0 reported
    anything.
    """
    world = World(of_ranks(1, 4, Group("default", 2, 2)), num=10)
    world.round()
    one = next(
        i
        for i, a in world.given.items()
        if (d := a.role_spec.domain) is not None and d.dp_rank == first_to_report
    )
    world.hear(one)
    world.tell(one)
    world.round()
    assert {s.step for s in world.steps} <= {"assigned", "forming"}
    world.settle()
    assert "failed" not in {s.step for s in world.steps}
    assert world.counts() == {"chat": (2, 8, 0)}


@pytest.mark.req("S24", "S121")
def test_another_size_is_another_revision_and_the_old_domains_leave_when_it_serves() -> None:
    world = World(of_ranks(1, 2, Group("default", 2, 2)), num=16)
    world.settle()
    old = world.domains("chat", Role.DECODE)
    world.apply(of_ranks(1, 4, Group("default", 2, 2)))
    world.settle()
    new = world.domains("chat", Role.DECODE)
    assert [len(ranks) for ranks in new.values()] == [4, 4]
    assert old.keys().isdisjoint(new.keys())
    assert world.counts() == {"chat": (2, 8, 0)}


@pytest.mark.req("S121")
def test_the_control_plane_holds_domains_of_eight_through_deaths_and_a_new_leader() -> None:
    """Domains in production have 8 ranks (1TP8DP). Six of the 48 instances are spare."""
    world = World(of_ranks(2, 8, Group("default", 5, 4)), num=48)
    world.settle()
    for n in range(6):
        decodes = world.domains("chat", Role.DECODE)
        assert [len(ranks) for ranks in decodes.values()] == [8] * 4
        lost = list(decodes.values())[n % 4][(3 * n) % 8]
        world.kill(lost)
        if n % 2:
            world.work_round()
            world.elect()
        world.settle()
        world.start(lost)
    assert world.counts() == {"chat": (10, 32, 0)}
    assert len(world.given) == 42


@pytest.mark.fault("F11", "F21")
@pytest.mark.parametrize("num_rounds", range(10))
@pytest.mark.parametrize("num_written", [1, 3])
def test_a_leader_that_dies_between_the_writes_of_a_domain_leaves_none_half_assigned(
    num_rounds: int, num_written: int
) -> None:
    world = World(PAIR, num=13)
    for _ in range(num_rounds):
        world.now += 1
        world.round(num_written=num_written)
        for instance_id in list(world.processes):
            world.hear(instance_id)
            world.work(instance_id)
            world.tell(instance_id)
    world.elect()
    world.settle()
    assert [len(ranks) for ranks in world.domains("chat", Role.PREFILL).values()] == [2, 2]
    assert [len(ranks) for ranks in world.domains("chat", Role.DECODE).values()] == [4, 4]
    assert len(world.given) == 12


@pytest.mark.fault("F21")
def test_a_serving_domain_survives_the_loss_of_all_assignments() -> None:
    world = World(PAIR, num=13)
    world.settle()
    before = {i: p.life.incarnation for i, p in world.processes.items()}
    given = dict(world.given)
    world.given.clear()
    world.settle()
    assert {i: p.life.incarnation for i, p in world.processes.items()} == before
    assert {i: a.role_spec.domain for i, a in world.given.items()} == {
        i: a.role_spec.domain for i, a in given.items()
    }
