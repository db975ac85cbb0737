"""Tests which callers an endpoint picker accepts, and which health status it reports. A picker is
the port of a gateway at which proxies ask which gateway takes a request.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub

from pdmesh.envoy.v3.external_processor_pb2_grpc import ExternalProcessorStub
from pdmesh.net.tls.own_certificate import using_certificates
from tests.fakes.gateway_mesh import GatewayMesh, gateway_mesh
from tests.support.proxies.asking import ENDPOINT, GET_MODELS, endpoints_of
from tests.support.proxies.envoy import Config, cluster_of
from tests.support.proxies.picked_site import gateway_record, picked_site
from tests.support.sites.certificates import TestAuthority
from tests.support.sites.refused_calls import refusal

NAME = "gateway-0.gateway.pdmesh"  # the name in the certificate of gateway-0


@pytest.fixture
def ours(tmp_path: Path) -> TestAuthority:
    return TestAuthority(tmp_path / "ours")


@contextlib.asynccontextmanager
async def secure_mesh(
    folder: Path, authority: TestAuthority, **settings: Any
) -> AsyncIterator[GatewayMesh]:
    """One gateway whose picker serves with the mesh's TLS. The other servers of this process use no
    TLS.
    """
    with using_certificates(authority.folder("gateway", "gateway-0")):
        async with gateway_mesh(folder, 0, 0, picker_port=0, **settings) as mesh:
            mesh.register(gateway_record(mesh.gateway, 0))
            yield mesh


async def named(mesh: GatewayMesh, certificate: Path | None, ca: Path) -> str:
    """The endpoints that the picker names to a caller with this certificate."""
    key, chain = (
        (None, None)
        if certificate is None
        else ((certificate / "tls.key").read_bytes(), (certificate / "tls.crt").read_bytes())
    )
    trusted = (ca / "ca.crt").read_bytes()
    credentials = grpc.ssl_channel_credentials(trusted, key, chain)
    options = [("grpc.ssl_target_name_override", NAME)]
    assert mesh.gateway.picker is not None
    address = f"127.0.0.1:{mesh.gateway.picker.port}"
    async with grpc.aio.secure_channel(address, credentials, options=options) as channel:
        stream = ExternalProcessorStub(channel).Process(iter([GET_MODELS]), timeout=60)
        async for answer in stream:
            (header,) = answer.request_headers.response.header_mutation.set_headers
            assert header.header.key == ENDPOINT
            assert header.header.raw_value.decode() == endpoints_of(answer)
            return endpoints_of(answer)
    raise AssertionError("the picker said nothing")


async def refused(mesh: GatewayMesh, certificate: Path | None, ca: Path) -> grpc.aio.AioRpcError:
    found = await refusal(lambda: named(mesh, certificate, ca))
    assert found is not None
    return found


async def test_a_proxy_with_a_certificate_of_the_mesh_is_answered(
    tmp_path: Path, ours: TestAuthority
) -> None:
    async with secure_mesh(tmp_path, ours) as mesh:
        proxy = ours.issue("proxy", "edge")
        endpoint = f"127.0.0.1:{mesh.gateway.http.port}"
        assert await named(mesh, proxy, proxy) == endpoint


async def test_others_are_refused(tmp_path: Path, ours: TestAuthority) -> None:
    theirs = TestAuthority(tmp_path / "theirs")
    async with secure_mesh(tmp_path, ours) as mesh:
        ca = ours.issue("proxy", "edge")
        for role in ("prefill", "viewer", "gateway"):
            found = await refused(mesh, ours.issue(role, "x"), ca)
            assert found.code() is grpc.StatusCode.PERMISSION_DENIED, role
            assert f"not for {role}/x" in str(found.details())
        for certificate in (theirs.issue("proxy", "edge"), None):
            found = await refused(mesh, certificate, ca)
            assert found.code() is grpc.StatusCode.UNAVAILABLE
        expired = ours.issue("proxy", "late", days=-1)
        assert (await refused(mesh, expired, ca)).code() is grpc.StatusCode.UNAVAILABLE


async def test_any_caller_over_tls_is_answered_where_proxies_can_show_no_certificate(
    tmp_path: Path, ours: TestAuthority
) -> None:
    async with secure_mesh(tmp_path, ours, picker_callers="any") as mesh:
        ca = ours.issue("gateway", "gateway-0")
        assert await named(mesh, None, ca) == f"127.0.0.1:{mesh.gateway.http.port}"
        assert mesh.gateway.picker is not None
        async with grpc.aio.insecure_channel(f"127.0.0.1:{mesh.gateway.picker.port}") as plain:
            with pytest.raises(grpc.aio.AioRpcError):
                await HealthStub(plain).Check(health_pb2.HealthCheckRequest(), timeout=20)


async def test_envoy_asks_the_picker_over_mutual_tls(tmp_path: Path, ours: TestAuthority) -> None:
    proxy = ours.issue("proxy", "edge")

    def over_tls(config: Config) -> None:
        kind = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext"
        pair = {"certificate_chain": "tls.crt", "private_key": "tls.key"}
        files = {name: {"filename": str(proxy / file)} for name, file in pair.items()}
        san = {"san_type": "URI", "matcher": {"prefix": "spiffe://pdmesh/gateway/"}}
        trusted = {
            "trusted_ca": {"filename": str(proxy / "ca.crt")},
            "match_typed_subject_alt_names": [san],
        }
        context = {
            "alpn_protocols": ["h2"],  # Envoy's health checks do not offer HTTP/2 by themselves
            "tls_certificates": [files],
            "validation_context": trusted,
        }
        cluster_of(config, "picker")["transport_socket"] = {
            "name": "envoy.transport_sockets.tls",
            "typed_config": {"@type": kind, "common_tls_context": context},
        }

    folder = ours.folder("gateway", "gateway-0")
    async with picked_site(tmp_path, over_tls, certificates=folder) as site:
        answer = await site.ask("abc")
        assert answer.json()["choices"][0]["text"] == site.mesh.expected_text("abc", 4)
        assert len(site.master.queries) == 1
        assert await site.envoy.counter("cluster.picker.ssl.handshake") >= 1


async def test_the_health_of_the_picker_is_told_by_the_names_of_the_protocol(
    tmp_path: Path,
) -> None:
    async with gateway_mesh(tmp_path, 0, 0, picker_port=0) as mesh:
        assert mesh.gateway.picker is not None
        async with grpc.aio.insecure_channel(f"127.0.0.1:{mesh.gateway.picker.port}") as channel:
            stub = HealthStub(channel)

            async def status(service: str) -> str:
                answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
                return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))

            ready = ("", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor")
            for name in (*ready, "liveness"):
                assert await status(name) == "SERVING"
            mesh.gateway.picker._health.close()
            for name in ready:
                assert await status(name) == "NOT_SERVING"
            assert await status("liveness") == "SERVING"
            watch = stub.Watch(health_pb2.HealthCheckRequest(service="liveness"))
            # The stream ends because the picker has closed it.
            watched = [each.status async for each in watch]
            assert watched == [health_pb2.HealthCheckResponse.SERVING]
            listed = (await stub.List(health_pb2.HealthListRequest())).statuses
            assert listed.keys() == {*ready, "liveness"}
            with pytest.raises(grpc.aio.AioRpcError) as unknown:
                await status("another")
            assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
