"""Checks every port that a mesh listens on against the table in docs/security.md.

Each port must be in the table with its address. Ports between processes must refuse strangers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc
import httpx
import pytest
import yaml

from pdmesh import api_keys
from pdmesh.errors import MeshError, Unavailable, WrongMeshToken
from pdmesh.launcher.mesh import Mesh
from pdmesh.launcher.spec import MeshSpec
from pdmesh.net.grpc import rpc
from pdmesh.net.grpc.mesh_token import METADATA_KEY
from pdmesh.net.nats.bus import NatsBus
from pdmesh.net.nats.registry import NatsRegistry
from pdmesh.v1.inference_service_pb2 import ChatRequest
from pdmesh.v1.inference_service_pb2_grpc import InferenceServiceStub
from tests.support.attack.listeners import Listener, listeners
from tests.support.waiting import until

ROOT: Final = Path(__file__).resolve().parents[3]
HEADING: Final = "### What listens where"
LOCAL, ALL = "127.0.0.1", "0.0.0.0"
# A blank instance has no role yet. It opens the ports of its role when it gets one.
GROUPS: Final = """
groups:
  assigned: {scenario: assigned, prefill: 1, decode: 1}
scenarios:
  assigned: {allow_single: true}
"""


@dataclass(frozen=True, order=True)
class Port:
    service: str
    kind: str
    host: str


def named_ports(spec: MeshSpec) -> set[Port]:
    """The ports in the table of docs/security.md, with the addresses of this spec."""
    text = (ROOT / "docs/security.md").read_text()
    section = text.partition(HEADING)[2].partition("\n##")[0]
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \| ([^|]+) \|[^|]*\|$", section, re.MULTILINE)
    hosts = {"`--host`": spec.host, "`--inner-host`": spec.inner_host}
    return {
        Port(service, kind, hosts.get(address, address))
        for services, kind, address in rows[2:]
        for service in services.split(", ")
    }


@dataclass(frozen=True)
class Found:
    port: Port
    number: int


async def listening(mesh: Mesh) -> list[Found]:
    """All ports on which a process of the mesh listens, by the kernel's tables."""
    with mesh.as_commands():
        bus = await NatsBus.connect(mesh.nats_url, "test")
    view = await NatsRegistry(bus, 3.0).watch()
    addresses = {i: r.grpc_address for i, r in view.records.items()}
    await view.close()
    await bus.close()
    found = []
    for name, process in mesh.supervisor.specs.items():
        kinds = {_number(addresses.get(name, "")): "gRPC", _number(mesh.ops_address(name)): "ops"}
        if process.service == "nats":
            kinds = {_number(mesh.nats_url): "NATS"}
        elif process.service == "gateway":
            kinds[_number(mesh.http_url)] = "HTTP"
        else:
            kinds[0] = "none"
        for listener in listeners(mesh.pid(name)):
            kind = kinds.get(listener.port) or _other(process.service, listener)
            host = _host(listener, mesh.spec if kind == "KV" else None)
            found.append(Found(Port(process.service, kind, host), listener.port))
    return found


def _number(address: str) -> int:
    return int(address.rpartition(":")[2] or 0)


def _other(service: str, listener: Listener) -> str:
    """The kind of a port that is in no record. A TCP port of an instance is then one of UCX, which
    chooses its ports itself.
    """
    is_kv = service in {"prefill", "decode", "instance"} and listener.protocol == "tcp"
    return "KV" if is_kv else f"{listener.protocol} {listener.port}"


def _host(listener: Listener, spec: MeshSpec | None) -> str:
    """The port's address as the table writes it. For 0.0.0.0, gRPC listens on IPv4 and IPv6, and
    UCX on the address of each interface.
    """
    if listener.host == "::" or (spec is not None and spec.inner_host == ALL):
        return ALL
    return listener.host


def mesh_spec(directory: Path, **options: Any) -> MeshSpec:
    file = directory / "groups.yaml"
    file.write_text(GROUPS)
    return MeshSpec(
        engine="sim",
        num_prefill=1,
        num_decode=1,
        num_blank=2,
        groups_file=file,
        node_agent=True,
        http_port=0,
        grpc_port=0,
        **options,
    )


async def check_ports(mesh: Mesh) -> list[Found]:
    """Wait until the blank instances have loaded and listen for KV, and then check that the ports
    are exactly those of the table.
    """
    named = named_ports(mesh.spec)
    found: list[Found] = []

    async def are_all_there() -> bool:
        found[:] = await listening(mesh)
        return {f.port for f in found} >= named

    await until(are_all_there, 60)
    assert {f.port for f in found} == named
    return found


async def test_a_mesh_listens_where_the_table_says_and_nowhere_else(tmp_path: Path) -> None:
    async with Mesh(mesh_spec(tmp_path), tmp_path / "mesh") as mesh:
        found = await check_ports(mesh)
    assert {f.port.host for f in found} == {LOCAL}


async def test_on_another_address_only_gateways_listen_and_strangers_get_nowhere(
    tmp_path: Path,
) -> None:
    """`pdmesh up --host ADDRESS --keys FILE` once made all processes listen there, and an instance
    served any caller.
    """
    keys = api_keys.KeyFile()
    key = api_keys.issue(keys, "acme")
    api_keys.save(tmp_path / "keys.json", keys)
    spec = mesh_spec(tmp_path, host=ALL, keys_file=tmp_path / "keys.json")
    async with Mesh(spec, tmp_path / "mesh") as mesh:
        found = await check_ports(mesh)
        assert {f.port.service for f in found if f.port.host == ALL} == {"gateway"}
        inner = [f for f in found if f.port.kind == "gRPC" and f.port.service != "gateway"]
        for each in inner:
            await _refuses_strangers(each)
        async with httpx.AsyncClient(timeout=30) as client:
            url = mesh.http_url.replace(ALL, LOCAL)
            for token, status in (("nobody's", 401), (mesh.token, 401), (key, 200)):
                headers = {"authorization": f"Bearer {token}", METADATA_KEY: mesh.token}
                body = {"model": "default", "prompt": "hello", "max_tokens": 2}
                answer = await client.post(f"{url}/v1/completions", json=body, headers=headers)
                assert answer.status_code == status
        address = mesh.grpc_address.replace(ALL, LOCAL)
        async with rpc.channel(address, mesh.token) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await InferenceServiceStub(channel).Chat(ChatRequest(), timeout=30)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def _refuses_strangers(found: Found, error: type[MeshError] = WrongMeshToken) -> None:
    for token in ("", "of-another-mesh-0000"):
        async with rpc.channel(f"{LOCAL}:{found.number}", token) as channel:
            open_stream: Any = channel.stream_stream  # grpc-stubs requires serializers
            call = open_stream("/pdmesh.v1.InstanceService/Session")()
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call.read()
            assert type(rpc.from_rpc_error(refused.value)) is error, found


def image_settings() -> dict[str, str]:
    """The settings that the Dockerfile gives to every container."""
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    runtime = text.partition("AS runtime\n")[2].partition("\nFROM ")[0]
    (line,) = re.findall(r"^ENV (.*)$", runtime, re.MULTILINE)
    return dict(pair.partition("=")[::2] for pair in line.split())


@pytest.mark.parametrize(
    ("protection", "error"),
    [({"insecure_network": True}, WrongMeshToken), ({"tls": True}, Unavailable)],
)
async def test_with_the_image_s_settings_everything_between_processes_refuses_strangers(
    tmp_path: Path, protection: dict[str, bool], error: type[MeshError]
) -> None:
    """Processes refuse a stranger for a wrong token, or already because he has no certificate."""
    settings = image_settings()
    hosts = {"host": settings["PDMESH_HOST"], "inner_host": settings["PDMESH_INNER_HOST"]}
    spec = mesh_spec(tmp_path, **hosts, **protection, allow_anonymous=True, env={"UCX_TLS": "tcp"})
    assert hosts == {"host": ALL, "inner_host": ALL}
    async with Mesh(spec, tmp_path / "mesh") as mesh:
        for each in await check_ports(mesh):
            if each.port.kind == "gRPC" and each.port.service != "gateway":
                await _refuses_strangers(each, error)


def test_compose_publishes_the_gateway_alone_and_gives_every_service_its_secrets() -> None:
    everything = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    more = (None, ["blank"], ["standby"], ["node-agent"])
    services = {name: s for name, s in everything.items() if s.get("profiles") in more}
    published = {name: s["ports"] for name, s in services.items() if s.get("ports")}
    assert list(published) == ["gateway"]
    assert all(port.startswith("127.0.0.1:") for port in published["gateway"])
    own = {name: s["environment"] for name, s in services.items() if name not in {"nats", "redis"}}
    for name, environment in own.items():
        assert environment["PDMESH_INSECURE_NETWORK"] == "true", name
        assert environment["PDMESH_MESH_TOKEN"].startswith("${PDMESH_MESH_TOKEN:-"), name
        assert re.fullmatch(
            r"nats://pdmesh:\$\{PDMESH_NATS_PASSWORD:-.+\}@nats:4222",
            environment["PDMESH_NATS_URL"],
        )
        assert re.fullmatch(
            r"redis://:\$\{PDMESH_REDIS_PASSWORD:-.+\}@redis:6379/0",
            environment["PDMESH_REDIS_URL"],
        )
    masters = {name for name, environment in own.items() if "PDMESH_ADMIN_TOKEN" in environment}
    assert masters == {"master-scheduler", "master-standby"}
    assert "authorization" in (ROOT / "deploy/docker/nats.conf").read_text()
    assert "requirepass $$REDISCLI_AUTH" in services["redis"]["command"][-1]
