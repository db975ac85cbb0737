"""Tests that a gateway becomes ready only when its own test request has passed prefill, KV transfer
and decode. The addresses in the registry are not enough.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request

import pytest

from pdmesh.engine.sim_tokenizer import write_sim_model
from tests.support.sites.instance_site import Process, Site, site
from tests.support.waiting import until

__all__ = ["site"]  # pytest finds the fixture under this name


async def start_gateway(site: Site) -> Process:
    model = site.directory / "model"
    write_sim_model(model)
    return await site.start(
        "gateway", "gateway-0", MODEL_DIR=str(model), HTTP_PORT="0", GRPC_PORT="0"
    )


def ask(process: Process, path: str, body: bytes | None = None) -> tuple[int, bytes]:
    address = process.record.ops_address if body is None else process.record.http_address
    request = urllib.request.Request(f"http://{address}{path}", body)
    request.add_header("content-type", "application/json")
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(request, timeout=30) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as exc:
        with exc:
            return exc.code, exc.read()


def waiting_for(process: Process) -> list[str]:
    status, body = ask(process, "/health/ready")
    return [] if status == 200 else json.loads(body)["waiting_for"]


async def test_a_gateway_is_not_ready_until_its_requests_get_kv_across(
    site: Site,
) -> None:
    await site.start("prefill", "prefill-0")
    cut = await site.start(
        "decode", "decode-0", FAILPOINT="decode.asking=drop", TRANSFER_TIMEOUT_S="0.5"
    )
    gateway = await start_gateway(site)
    await until(lambda: b"path.failed" in gateway.log_file.read_bytes(), 60)
    assert waiting_for(gateway) == ["path"]
    cut.child.kill()
    await site.start("decode", "decode-0")
    await until(lambda: not waiting_for(gateway), 60)


async def test_a_gateway_that_was_ready_stays_ready_if_its_path_fails(site: Site) -> None:
    await site.start("prefill", "prefill-0")
    gateway = await start_gateway(site)
    decode = await site.start("decode", "decode-0")
    await until(lambda: not waiting_for(gateway), 60)
    decode.child.kill()
    cut = await site.start("decode", "decode-0", FAILPOINT="decode.asking=drop")
    await site.until(lambda: cut.is_ready(), 60)
    assert waiting_for(gateway) == []


@pytest.mark.parametrize("roles", [("prefill",), ("prefill", "decode")])
async def test_behind_a_proxy_a_mesh_is_ready_and_answers(
    site: Site, monkeypatch: pytest.MonkeyPatch, roles: tuple[str, ...]
) -> None:
    """A user found this fault. gRPC obeys http_proxy, so the mesh reported that it was ready, but
    every request got a 503.
    """
    for name in (
        "http_proxy",
        "HTTP_PROXY",
        "https_proxy",
        "HTTPS_PROXY",
        "all_proxy",
        "grpc_proxy",
    ):
        monkeypatch.setenv(name, "http://127.0.0.1:1")  # no process listens on this port
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    for role in roles:
        await site.start(role, f"{role}-0")
    gateway = await start_gateway(site)
    await until(lambda: not waiting_for(gateway), 60)
    body = {"model": "default", "prompt": "hello", "max_tokens": 4, "ignore_eos": True}
    status, answer = ask(gateway, "/v1/completions", json.dumps(body).encode())
    assert (status, json.loads(answer)["usage"]["completion_tokens"]) == (200, 4)
