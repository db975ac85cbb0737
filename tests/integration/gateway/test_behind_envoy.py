"""Tests TLS for clients as deploy/envoy/tls.yaml configures it, with a real Envoy in front of a
gateway.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import grpc
import pytest

from pdmesh import api_keys
from pdmesh.api_keys import KeyFile
from pdmesh.core.access.process_identity import ProcessIdentity
from pdmesh.embedded.ports import PortReservation
from pdmesh.net.tls.authority import Authority
from pdmesh.services.gateway.access.access_control import KeyedAccess
from pdmesh.v1 import inference_service_pb2 as pb
from pdmesh.v1.common_pb2 import ROLE_DECODE
from pdmesh.v1.inference_service_pb2_grpc import InferenceServiceStub
from tests.fakes.fake_instance import FakeInstance
from tests.fakes.gateway_mesh import GatewayMesh, gateway_mesh
from tests.support.waiting import until

DEPLOYED: Final = Path("deploy/envoy")
ENVOY: Final = Path(sys.executable).with_name("envoy")
PUBLIC: Final = ProcessIdentity("gateway", "public")
BODY: Final = {"model": "tiny", "prompt": "abc", "max_tokens": 8}


class Front:
    """An Envoy in front of the gateway, with a certificate for `localhost`."""

    def __init__(self, folder: Path, mesh: GatewayMesh, key: str) -> None:
        self.folder, self.mesh, self.key = folder, mesh, key
        self._reserved = PortReservation("127.0.0.1", 0)
        self.port = self._reserved.port
        self.authority = Authority.opened(folder / "tls")
        self.certificate = folder / "public"
        self.renew()
        config = (DEPLOYED / "tls.yaml").read_text()
        for old, new in (
            ("address: 0.0.0.0, port_value: 8443", f"address: 127.0.0.1, port_value: {self.port}"),
            ("port_value: 8000", f"port_value: {mesh.gateway.http.port}"),
            ("port_value: 8001", f"port_value: {mesh.gateway.grpc.port}"),
            ("deploy/envoy/certificate.yaml", str(folder / "certificate.yaml")),
        ):
            assert config.count(old) == 1, old
            config = config.replace(old, new)
        (folder / "envoy.yaml").write_text(config)
        secret = (DEPLOYED / "certificate.yaml").read_text()
        (folder / "certificate.yaml").write_text(
            secret.replace("/etc/pdmesh/public", str(self.certificate))
        )
        command = [str(ENVOY), "-c", str(folder / "envoy.yaml"), "--concurrency", "1"]
        with (folder / "envoy.log").open("wb") as log:
            self._process = subprocess.Popen(
                [*command, "--disable-hot-restart"], stdout=log, stderr=log
            )

    def check(self) -> None:
        assert self._process.poll() is None, (self.folder / "envoy.log").read_text()

    def renew(self) -> None:
        """Replace each file of the certificate by a move, as cert-manager and `pdmesh certs` do."""
        self.authority.issue(PUBLIC, self.certificate, ("localhost", "127.0.0.1"))

    @property
    def ca(self) -> bytes:
        return (self.certificate / "ca.crt").read_bytes()

    def serial(self) -> int:
        """The serial number of the certificate that Envoy shows. Raises OSError if no connection
        succeeds.
        """
        context = ssl.create_default_context(cafile=str(self.certificate / "ca.crt"))
        with (
            socket.create_connection(("127.0.0.1", self.port), timeout=20) as raw,
            context.wrap_socket(raw, server_hostname="localhost") as wrapped,
        ):
            found: Any = wrapped.getpeercert()
            return int(found["serialNumber"], 16)

    async def curl(self, path: str, *options: str, host: str = "localhost") -> tuple[str, str]:
        """Run curl and return the body, and the status and HTTP version that its option `-w`
        prints.
        """
        command = [
            "curl", "-sS", "--max-time", "60", "--cacert", str(self.certificate / "ca.crt"),
            "-w", "\n%{http_code} %{http_version}", *options, f"https://{host}:{self.port}{path}",
        ]  # fmt: skip
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True)
        body, _, told = done.stdout.rpartition("\n")
        return body, told if done.returncode == 0 else done.stderr

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reserved.close()


@asynccontextmanager
async def front(folder: Path, num_decodes: int = 1) -> AsyncIterator[Front]:
    file = KeyFile()
    key = api_keys.issue(file, "acme")
    api_keys.save(folder / "keys.json", file)
    access = KeyedAccess(folder / "keys.json")
    async with gateway_mesh(folder, num_decodes=num_decodes, access=access) as mesh:
        envoy = Front(folder, mesh, key)

        async def is_up() -> bool:
            envoy.check()
            with contextlib.suppress(OSError):
                return bool(await asyncio.to_thread(envoy.serial))
            return False

        try:
            await until(is_up)
            yield envoy
        finally:
            envoy.close()


@pytest.mark.parametrize(("option", "version"), [("--http1.1", "1.1"), ("--http2", "2")])
async def test_clients_choose_http_1_or_2_over_tls(
    tmp_path: Path, option: str, version: str
) -> None:
    async with front(tmp_path) as at:
        key = ("-H", f"authorization: Bearer {at.key}")
        sent = ("-H", "content-type: application/json", "-d", json.dumps(BODY))
        body, told = await at.curl("/v1/completions", option, *key, *sent)
        assert told == f"200 {version}", body
        assert json.loads(body)["choices"][0]["text"] == at.mesh.expected_text("abc", 8)
        body, told = await at.curl("/v1/completions", option, *sent)
        assert told == f"401 {version}"
        assert json.loads(body)["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize("option", ["--http1.1", "--http2"])
async def test_each_token_of_a_stream_passes_before_the_next_is_computed(
    tmp_path: Path, option: str
) -> None:
    async with front(tmp_path, num_decodes=0) as at:
        decode = await at.mesh.add(FakeInstance(ROLE_DECODE, "decode-0", step_s=1e6))
        body = json.dumps({**BODY, "stream": True})
        process = await asyncio.create_subprocess_exec(
            "curl", "-sSN", option, "--max-time", "60", "--cacert",
            str(at.certificate / "ca.crt"), "-H", f"authorization: Bearer {at.key}", "-H",
            "content-type: application/json", "-d", body,
            f"https://localhost:{at.port}/v1/completions", stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert process.stdout is not None
        text = ""
        for number in range(8):
            if number:
                await until(lambda: decode.legs)
                decode.step()
            while len(text) < number + 1:
                line = await asyncio.wait_for(process.stdout.readline(), 60)
                if line.startswith(b"data: {"):
                    text += json.loads(line.removeprefix(b"data: "))["choices"][0]["text"]
        assert text == at.mesh.expected_text("abc", 8)
        assert await process.wait() == 0


async def test_grpc_is_on_the_same_port(tmp_path: Path) -> None:
    async with front(tmp_path) as at:
        credentials = grpc.ssl_channel_credentials(at.ca)
        request = pb.GenerateRequest(
            model="tiny", text="abc", params=pb.GenerationParams(max_tokens=8)
        )
        async with grpc.aio.secure_channel(f"localhost:{at.port}", credentials) as channel:
            stub = InferenceServiceStub(channel)
            metadata = (("authorization", f"Bearer {at.key}"),)
            answer = await stub.Generate(request, metadata=metadata, timeout=60)
            assert answer.text == at.mesh.expected_text("abc", 8)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.Generate(request, timeout=60)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_plain_text_old_tls_and_wrong_names_are_refused(tmp_path: Path) -> None:
    async with front(tmp_path) as at:
        _, told = await at.curl("/health/live", "--tls-max", "1.1")
        assert "curl: (35)" in told
        other = ("--resolve", f"elsewhere.example:{at.port}:127.0.0.1")
        _, told = await at.curl("/health/live", *other, host="elsewhere.example")
        assert "curl: (60)" in told
        plain = ["curl", "-sS", "--max-time", "20", f"http://localhost:{at.port}/health/live"]
        done = await asyncio.to_thread(subprocess.run, plain, capture_output=True)
        assert done.returncode != 0


async def test_a_renewed_certificate_is_shown_without_a_restart(tmp_path: Path) -> None:
    async with front(tmp_path) as at:
        before = await asyncio.to_thread(at.serial)
        at.renew()

        async def is_new() -> bool:
            return await asyncio.to_thread(at.serial) != before

        await until(is_new)
