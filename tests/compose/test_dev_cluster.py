"""The development cluster as a user starts it: six services in containers.

Clients use the gateway's two ports.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.compose.asking import ask, ask_grpc
from tests.compose.cluster import Cluster

pytestmark = [pytest.mark.compose, pytest.mark.timeout(1800)]

SERVERS = ["nats", "redis"]
SERVICES = [
    "decode-0", "decode-1", "gateway", "health-monitor", "kv-cache-index", "master-scheduler",
    "prefill-0", "prefill-1",
]  # fmt: skip


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster() as running:
        yield running


@pytest.fixture(scope="module")
def answer(cluster: Cluster) -> str:
    """The answer of the whole mesh, for comparison with later answers.

    The answer of the simulated engine depends only on the prompt and its KV.
    """
    return ask(cluster)


def test_every_service_runs_and_is_healthy(cluster: Cluster) -> None:
    health = {c["Service"]: c["Health"] for c in cluster.containers()}
    assert health == dict.fromkeys(sorted(SERVERS + SERVICES), "healthy")


def test_http_and_grpc_give_the_same_answer(cluster: Cluster, answer: str) -> None:
    assert answer
    assert ask_grpc(cluster) == answer


def test_kv_moves_between_containers(cluster: Cluster, answer: str) -> None:
    assert answer
    pulled = [cluster.metric(s, "pdmesh_kv_transfer_bytes_total") for s in ("decode-0", "decode-1")]
    assert sum(pulled) > 0


def test_only_the_gateway_is_published_and_only_on_loopback(cluster: Cluster) -> None:
    published = {
        (c["Service"], p["URL"], p["PublishedPort"])
        for c in cluster.containers()
        for p in c["Publishers"] or ()
        if p["PublishedPort"]
    }
    assert published == {
        ("gateway", "127.0.0.1", cluster.http_port),
        ("gateway", "127.0.0.1", cluster.grpc_port),
    }


def test_only_the_gateways_container_can_reach_the_internet(cluster: Cluster) -> None:
    routes = {s: cluster.execute(s, "cat", "/proc/net/route").stdout for s in SERVERS + SERVICES}
    is_default = "\t00000000\t"  # destination 0.0.0.0
    assert [s for s, table in routes.items() if is_default in table.split("\n", 1)[1][:20]] == [
        "gateway"
    ]


@pytest.mark.parametrize("service", SERVERS + SERVICES)
def test_a_container_has_no_privileges_and_writes_nothing_to_its_image(
    cluster: Cluster, service: str
) -> None:
    found = cluster.inspect(service)["HostConfig"]
    assert found["ReadonlyRootfs"]
    assert found["CapDrop"] == ["ALL"]
    assert found["SecurityOpt"] == ["no-new-privileges:true"]
    assert found["Memory"] > 0
    assert found["PidsLimit"] > 0
    assert cluster.execute(service, "id", "-u").stdout.strip() == "10001"


@pytest.mark.req("S74")
@pytest.mark.parametrize(
    "service",
    [
        "decode-0",
        "prefill-0",
        "master-scheduler",
        "kv-cache-index",
        "health-monitor",
        "nats",
        "redis",
    ],
)
def test_the_mesh_answers_while_a_dead_process_is_restarted(
    cluster: Cluster, answer: str, service: str
) -> None:
    num_restarts = cluster.inspect(service)["RestartCount"]
    cluster.kill_process(service)
    assert ask(cluster) == answer
    cluster.wait_restarted(service, num_restarts + 1, timeout_s=60)
    assert ask(cluster) == answer


@pytest.mark.req("S74")
def test_a_killed_gateway_comes_back_and_finds_the_mesh(cluster: Cluster, answer: str) -> None:
    num_restarts = cluster.inspect("gateway")["RestartCount"]
    cluster.kill_process("gateway")
    cluster.wait_restarted("gateway", num_restarts + 1, timeout_s=60)
    assert ask(cluster) == answer
    assert ask_grpc(cluster) == answer
