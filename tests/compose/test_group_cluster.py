"""A cluster whose groups are made of blank instances, with a standby master and a node agent.

Every test finds the group `chat` complete, and leaves it complete.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from pdmesh.core.health.node_status import parse
from tests.compose.asking import LongStream, ask, ask_grpc
from tests.compose.cluster import ROOT, Cluster
from tests.compose.groups import Groups, faults, groups
from tests.support import waiting

pytestmark = [pytest.mark.compose, pytest.mark.timeout(1800)]

FILE = (ROOT / "deploy/docker/groups.yaml").read_text()
LARGER = "groups: {chat: {prefill: 2, decode: 3}}\n"
INSTANCES = [f"instance-{i}" for i in range(5)]
CONTROL = ["kv-cache-index", "health-monitor", "node-agent"]
MASTERS = ["master-scheduler", "master-standby"]
# This timeout suits a slow machine, on which each query of the groups starts a process in a
# container.
wait_until = partial(waiting.wait_until, within_s=300)
LONG = 800  # tokens that take longer, at 20 ms each, than a change of leader


@pytest.fixture(scope="module")
def devices(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the device files. Containers can read it, unlike pytest's own folders."""
    folder = tmp_path_factory.mktemp("devices")
    folder.chmod(0o755)
    return folder


@pytest.fixture(scope="module")
def bare(devices: Path) -> Iterator[Cluster]:
    """The cluster without its gateway, which becomes ready only when a group serves."""
    with Cluster(
        *MASTERS,
        *CONTROL,
        *INSTANCES,
        COMPOSE_PROFILES="blank,standby,node-agent",
        PDMESH_FIXED_INSTANCES="0",
        PDMESH_DEVICE_DIR=str(devices),
    ) as running:
        yield running


@pytest.fixture(scope="module")
def before(bare: Cluster) -> Groups:
    wait_until(lambda: groups(bare).blank == INSTANCES)
    return groups(bare)


@pytest.fixture(scope="module")
def cluster(bare: Cluster, before: Groups) -> Cluster:
    """The whole cluster, in which the group of deploy/docker/groups.yaml serves."""
    assert before.members == {}
    bare.pdmesh("apply", "-", "--wait", stdin=FILE)
    bare.up()
    return bare


@pytest.fixture(scope="module")
def answer(cluster: Cluster) -> str:
    """An answer for comparison. It depends only on the prompt and its KV."""
    return ask(cluster)


def leader(cluster: Cluster) -> str:
    """The leading master. Empty unless exactly one leads."""
    running = [master for master in MASTERS if master in cluster.services]
    leading = [master for master in running if cluster.metric(master, "pdmesh_leader")]
    return leading[0] if len(leading) == 1 else ""


def is_whole_without(cluster: Cluster, instance: str) -> bool:
    found = groups(cluster)
    return found.is_whole(prefill=2, decode=2) and instance not in found.all_members


def set_level(devices: Path, device: str, level: int, reason: str = "") -> None:
    """Write a device file atomically, as a tool of the hardware does."""
    part = devices / f"{device}.part"
    part.write_text(json.dumps({"level": level, "reason": reason}))
    part.replace(devices / f"{device}.json")


def test_no_instance_has_a_role_before_a_desired_state_is_applied(
    bare: Cluster, before: Groups
) -> None:
    assert before.blank == INSTANCES
    assert set(bare.services) >= {*INSTANCES, *MASTERS, *CONTROL}


def test_every_service_is_healthy_and_none_has_a_role_of_its_own(cluster: Cluster) -> None:
    ours = {"gateway", "nats", "redis", *INSTANCES, *MASTERS, *CONTROL}
    assert {c["Service"]: c["Health"] for c in cluster.containers()} == dict.fromkeys(
        ours, "healthy"
    )


@pytest.mark.parametrize("service", ["master-standby", "node-agent", "instance-0"])
def test_the_containers_of_the_profiles_are_as_hardened_as_the_others(
    bare: Cluster, service: str
) -> None:
    found = bare.inspect(service)["HostConfig"]
    assert found["ReadonlyRootfs"]
    assert found["CapDrop"] == ["ALL"]
    assert found["SecurityOpt"] == ["no-new-privileges:true"]
    assert found["Memory"] > 0
    assert found["PidsLimit"] > 0
    assert bare.execute(service, "id", "-u").stdout.strip() == "10001"
    assert bare.inspect(service)["NetworkSettings"]["Ports"].get("9100/tcp") is None


@pytest.mark.req("S23", "S74")
def test_an_applied_file_makes_a_group_of_blank_instances_and_it_serves(
    cluster: Cluster, answer: str
) -> None:
    found = groups(cluster)
    assert found.is_whole(prefill=2, decode=2), found
    assert sorted(found.all_members + found.blank) == INSTANCES
    assert answer
    assert ask_grpc(cluster) == answer
    pulled = {
        name: cluster.metric(name, "pdmesh_kv_transfer_bytes_total")
        for name in found.members["decode"]
    }
    assert sum(pulled.values()) > 0


@pytest.mark.req("S23", "S74")
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_blank_instance_takes_the_place_of_a_member_whose_container_is_killed(
    cluster: Cluster, answer: str, role: str
) -> None:
    before = groups(cluster)
    victim = before.members[role][0]
    (spare,) = before.blank
    cluster.kill(victim)
    assert ask(cluster) == answer
    wait_until(lambda: is_whole_without(cluster, victim))
    assert spare in groups(cluster).members[role]
    assert ask(cluster) == answer
    cluster.start(victim)
    wait_until(lambda: groups(cluster).blank == [victim])
    assert groups(cluster).is_whole(prefill=2, decode=2)


@pytest.mark.req("S33", "S34", "S74")
def test_the_node_agent_tells_of_a_faulty_device_and_its_instance_is_replaced(
    cluster: Cluster, devices: Path, answer: str
) -> None:
    """If an instance has no devices, the instance's name serves as the name of a device."""
    before = groups(cluster)
    victim = before.members["prefill"][0]
    (spare,) = before.blank
    set_level(devices, victim, 3, "DEVICE_RESET_REQUIRED")
    wait_until(lambda: is_whole_without(cluster, victim))
    assert spare in groups(cluster).members["prefill"]
    assert "DEVICE_RESET_REQUIRED" in groups(cluster).out[victim]
    assert ask(cluster) == answer
    # The instances of the machine can also read the fault from a file, without the bus.
    text = cluster.execute(spare, "cat", "/run/pdmesh/node-status.json").stdout
    assert [(d.device, int(d.level)) for d in parse(text).devices] == [(victim, 3)]
    assert cluster.execute(spare, "touch", "/run/pdmesh/node-status.json").returncode != 0

    set_level(devices, victim, 0)
    wait_until(lambda: victim not in faults(cluster))
    cluster.pdmesh("uncordon", victim)
    wait_until(lambda: groups(cluster).blank == [victim])


@pytest.mark.req("S33", "S74")
def test_members_tell_that_the_node_agent_is_gone_and_go_on_serving(
    cluster: Cluster, answer: str
) -> None:
    before = groups(cluster)
    wait_until(lambda: not faults(cluster))
    cluster.kill("node-agent")
    gone = dict.fromkeys(before.all_members, "NODE_STATUS_OLD")
    wait_until(lambda: faults(cluster) == gone)
    assert ask(cluster) == answer
    assert groups(cluster) == before
    cluster.start("node-agent")
    wait_until(lambda: not faults(cluster))


@pytest.mark.req("S74")
def test_the_standby_leads_when_the_leaders_container_is_killed_and_a_stream_goes_on(
    cluster: Cluster, answer: str
) -> None:
    wait_until(lambda: leader(cluster))
    lost = leader(cluster)
    (standby,) = set(MASTERS) - {lost}
    with LongStream(cluster, LONG) as stream:
        wait_until(lambda: stream.num_chunks > 10)
        cluster.kill(lost)
        assert ask(cluster) == answer  # perhaps no master leads yet
        wait_until(lambda: leader(cluster) == standby)
        seen = stream.num_chunks
        assert stream.is_alive(), "it ended too early to show anything"
        wait_until(lambda: stream.num_chunks > seen)
        assert ask(cluster) == answer
    assert stream.num_tokens == LONG
    with LongStream(cluster, LONG) as undisturbed:
        pass
    assert stream.text == undisturbed.text

    # The new leader also changes groups.
    cluster.pdmesh("apply", "-", "--wait", stdin=LARGER)
    assert groups(cluster).is_whole(prefill=2, decode=3)
    cluster.pdmesh("rollback", "--wait")
    wait_until(lambda: is_whole_without(cluster, ""))
    cluster.start(lost)
    cluster.wait_restarted(lost, 0, timeout_s=60)
    assert leader(cluster) == standby
