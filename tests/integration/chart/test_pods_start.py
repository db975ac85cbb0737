"""Starts every container of the chart with the chart's own command and environment.

Each container must become ready by its own probe, and together they must form a mesh. No API server
runs here. `tests.support.chart.kubelet` stands for the node.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import httpx
import pytest
from redis.asyncio import Redis
from redis.exceptions import AuthenticationError

from pdmesh.engine.sim_tokenizer import write_sim_model
from pdmesh.envoy.v3.external_processor_pb2_grpc import ExternalProcessorStub
from tests.support.attack.listeners import listeners
from tests.support.chart.helm import of_kind, render
from tests.support.chart.kubelet import ANY_ADDRESS, Kubelet, Pod, image_environment
from tests.support.proxies.asking import GET_MODELS, endpoints_of
from tests.support.waiting import until

SERVERS = ["pdmesh-nats", "pdmesh-redis"]
GATEWAY, MASTER = "pdmesh-gateway", "pdmesh-master-scheduler"
JOB = "pdmesh-desired-"
# Each role once. A blank instance has no role until the master gives it one. The desired state
# makes a group of the two blank instances.
POOLS = {
    "prefill": {"role": "prefill", "replicas": 1},
    "decode": {"role": "decode", "replicas": 1},
    "pooling": {"role": "pooling", "replicas": 1, "settings": {"MODEL": "sim-embed"}},
    "encoder": {"role": "encoder", "replicas": 1},
    "blank": {"role": "blank", "replicas": 1},
    "other": {"role": "blank", "replicas": 1},
}
DESIRED = {
    "scenarios": {"assigned": {"allow_single": True}},
    "groups": {"assigned": {"scenario": "assigned", "prefill": 1, "decode": 1}},
}


@pytest.fixture(
    params=[
        pytest.param(False, id="plain", marks=pytest.mark.nightly),
        pytest.param(True, id="tls"),
    ]
)
async def kubelet(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Kubelet]:
    write_sim_model(tmp_path / "model")
    values = {
        "gateway": {
            "allowAnonymous": True,
            "endpointPicker": {"enabled": True},
            "settings": {"PICKER_CALLERS": "any"},
        },
        "nodeAgent": {"enabled": True},
        "kv": {"netDevices": "lo"},
        "tls": {"enabled": request.param, "issuerName": "mesh"},
        "settings": {"SIM_LAW": "zero", "SIM_IMAGE_TOKENS": 16},
        "pools": {name: {**pool, "drainSeconds": 1} for name, pool in POOLS.items()},
        "desiredState": DESIRED,
    }
    folder = tmp_path / "node"
    folder.mkdir()
    image = {image_environment()["PDMESH_MODEL_DIR"]: tmp_path / "model"}
    async with Kubelet(render("", values), folder, image) as started:
        await started.start()
        yield started


async def test_all_containers_start_in_any_order_and_make_a_mesh(kubelet: Kubelet) -> None:
    jobs = [name for name in kubelet.pods if name.startswith(JOB)]
    services = [n for n in kubelet.pods if n not in [*SERVERS, *jobs] and "/" not in n]
    assert len(services) == 5 + len(POOLS)  # the five services include the node agent
    await kubelet.wait_ready(services)
    await _redis_asks_for_its_password(kubelet)
    _listen_where_the_network_policies_say(kubelet, services)

    gateway = kubelet.pods[GATEWAY]
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
        body = {"model": "default", "prompt": "hello", "max_tokens": 4, "temperature": 0}
        url = f"http://{gateway.ip}:8000/v1/completions"
        answer = await client.post(url, json=body)
        assert answer.status_code == 200, answer.text
    await _the_picker_names_the_pod(kubelet, gateway)

    # `kubectl exec deploy/pdmesh-master-scheduler` runs commands in the same way.
    status = kubelet.run(MASTER, "pdmesh", "status")
    assert status.returncode == 0, status.stderr
    assert all(kubelet.pods[name].name in status.stdout for name in services), status.stdout
    if "PDMESH_TLS_DIR" in kubelet.pods[MASTER].environment:
        _commands_need_the_operator_s_certificate(kubelet)
        await _nats_takes_a_new_certificate(kubelet)
    (job,) = jobs
    applied = kubelet.run(job)
    assert applied.returncode == 0, applied.stderr

    async def serves() -> bool:
        groups = kubelet.run(MASTER, "pdmesh", "groups")
        return groups.returncode == 0 and "serving" in groups.stdout

    await until(serves, 60)
    await kubelet.wait_ready(services)
    await _the_leader_has_the_metric_by_which_keda_scales(kubelet)

    # Ends all pods, as Kubernetes does when it drains a node. None of them may need to be killed.
    for name in services:
        assert await kubelet.pods[name].end() == 0, kubelet.pods[name].log.read_text()[-2000:]


async def _the_picker_names_the_pod(kubelet: Kubelet, gateway: Pod) -> None:
    """Calls the picker as a proxy of an InferencePool does, over TLS without a certificate or in
    plain text.
    """
    address = f"{gateway.ip}:9002"
    if "PDMESH_GATEWAY_TLS_DIR" in gateway.environment:
        ca = (gateway.mounts["/etc/pdmesh/tls"] / "ca.crt").read_bytes()
        name = f"{gateway.name}.gateway.pdmesh"
        options = [("grpc.ssl_target_name_override", name)]
        credentials = grpc.ssl_channel_credentials(ca)
        channel = grpc.aio.secure_channel(address, credentials, options=options)
    else:
        channel = grpc.aio.insecure_channel(address)
    async with channel:
        stream = ExternalProcessorStub(channel).Process(iter([GET_MODELS]), timeout=60)
        (said,) = [answer async for answer in stream]
    assert endpoints_of(said) == f"{gateway.ip}:8000"


async def _nats_takes_a_new_certificate(kubelet: Kubelet) -> None:
    """NATS must show the new certificate and close a connection that does not begin TLS."""
    pod = kubelet.pods["pdmesh-nats"]

    def shown() -> str:
        return ssl.get_server_certificate((pod.ip, 4222))

    before = await asyncio.to_thread(shown)
    kubelet.renew("pdmesh-nats", "/etc/nats-tls")

    async def is_new() -> bool:
        return await asyncio.to_thread(shown) != before

    await until(is_new, 60)
    reader, writer = await asyncio.open_connection(pod.ip, 4222)
    writer.write(b"CONNECT {}\r\nPING\r\n")
    assert await reader.read() == b""
    writer.close()


def _commands_need_the_operator_s_certificate(kubelet: Kubelet) -> None:
    master = kubelet.pods[MASTER].environment["PDMESH_MASTER_SCHEDULER_TLS_DIR"]
    for other in (["-u", "PDMESH_TLS_DIR"], [f"PDMESH_TLS_DIR={master}"]):
        refused = kubelet.run(MASTER, "env", *other, "pdmesh", "groups")
        assert refused.returncode != 0, refused.stdout


async def _the_leader_has_the_metric_by_which_keda_scales(kubelet: Kubelet) -> None:
    """The metric must have the labels over which the query of values-gpu.yaml sums."""
    (scaled,) = of_kind(render("gpu"), "ScaledObject")
    query = scaled["spec"]["triggers"][0]["metadata"]["query"]
    asked = re.fullmatch(r"sum\(max by \(([\w, ]+)\) \((\w+)\)\)", query)
    assert asked
    labels = set(asked[1].split(", "))
    async with httpx.AsyncClient(trust_env=False) as client:
        page = await client.get(f"http://{kubelet.pods[MASTER].ip}:9100/metrics")
    samples = re.findall(rf"^{asked[2]}{{(.*)}} (\S+)$", page.text, re.MULTILINE)
    # One for the prefill and one for the decode.
    assert sum(float(value) for _, value in samples) == 2
    assert all(labels <= set(re.findall(r"(\w+)=", each)) for each, _ in samples)


async def _redis_asks_for_its_password(kubelet: Kubelet) -> None:
    pod = kubelet.pods["pdmesh-redis"]
    async with Redis(host=pod.ip, password=pod.environment["REDISCLI_AUTH"]) as known:
        assert await known.ping()
        assert (await known.config_get("maxmemory"))["maxmemory"] == str(384 << 20)
    async with Redis(host=pod.ip) as stranger:
        with pytest.raises(AuthenticationError):
            await stranger.ping()


def _listen_where_the_network_policies_say(kubelet: Kubelet, names: list[str]) -> None:
    """Each pod must listen on exactly the ports that it declares. UCX must use only the range of
    ports that the policies open between instances.
    """
    for name in names:
        pod = kubelet.pods[name]
        role = pod.labels.get("pdmesh/role", "")
        declared = {port["containerPort"] for port in pod.container["ports"]}
        if role == "blank":  # a blank instance opens its other ports when it gets a role
            declared = {9100}
        found = {listener.port for listener in listeners(pod.pid)}
        kv = {port for port in found - declared if 20000 <= port <= 20999}
        assert found - kv == declared, name
        assert bool(kv) == (role in ("prefill", "decode", "encoder")), name


def test_the_kubelet_of_these_tests_leaves_no_path_and_no_address_of_a_container(
    tmp_path: Path,
) -> None:
    kubelet = Kubelet(render("sim"), tmp_path)
    for name, pod in kubelet.pods.items():
        texts = [*pod.command, *pod.environment.values()]
        assert not any(ANY_ADDRESS in text or "@pdmesh-nats" in text for text in texts), name
        if "/tmp" in pod.mounts:
            assert not any(text.startswith("/tmp/pdmesh") for text in texts), name
    conf = next(tmp_path.glob("pdmesh-nats/config/pdmesh.conf")).read_text()
    assert str(tmp_path) in conf
