"""Gateways and masters of the chart know their callers by its values: a file of API keys, and
tokens of a real OpenID provider.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdmesh import api_keys
from pdmesh.api_keys import KeyFile
from pdmesh.core.access.roles import AdminRole
from pdmesh.core.tenancy.entry import TenantEntry
from pdmesh.engine.sim_tokenizer import write_sim_model
from tests.support.chart.helm import Manifest, render
from tests.support.chart.kubelet import Kubelet, image_environment
from tests.support.sites.certificates import TestAuthority
from tests.support.sites.oidc_provider import AUDIENCE, OidcProvider, oidc_provider
from tests.support.waiting import until

GATEWAY, MASTER = "pdmesh-gateway", "pdmesh-master-scheduler"
USERS: dict[str, dict[str, Any]] = {
    "ann": {"org": {"tenant": "acme"}, "groups": ["mesh-watchers"]},
    "bob": {"org": {"tenant": "acme"}},
}


def values_of(provider: OidcProvider) -> dict[str, Any]:
    return {
        "gateway": {"keysSecret": "clients"},
        "masterScheduler": {"keysSecret": "operators"},
        "oidc": {
            "issuer": provider.issuer,
            "audience": AUDIENCE,
            "caConfigMap": "authorities",
            "tenantClaim": "org.tenant",
            "defaultLimits": {"requests_per_s": 1000},
            "roleClaim": "groups",
            "roles": {"mesh-watchers": "viewer"},
        },
        "networkPolicy": {"enabled": False},
        "kv": {"netDevices": "lo"},
        "settings": {"SIM_LAW": "zero"},
        "pools": {
            "prefill": None,
            "decode": None,
            "both": {"role": "fusion", "replicas": 1, "drainSeconds": 1},
        },
    }


def key_secret(folder: Path, name: str, role: AdminRole | None = None) -> tuple[str, Manifest]:
    """A key, and the Secret with its file."""
    file = KeyFile(tenants={name: TenantEntry()})
    key = api_keys.issue(file, name, role=role)
    api_keys.save(folder / f"{name}.json", file)
    text = (folder / f"{name}.json").read_text()
    return key, {"kind": "Secret", "metadata": {"name": name}, "stringData": {"keys.json": text}}


@pytest.fixture
async def provider(tmp_path: Path) -> AsyncIterator[OidcProvider]:
    with oidc_provider(tmp_path, 3600, 0, **USERS) as running:
        yield running


async def test_gateways_and_masters_take_keys_of_their_secret_and_tokens_of_the_provider(
    tmp_path: Path, provider: OidcProvider
) -> None:
    write_sim_model(tmp_path / "model")
    ca = (TestAuthority(tmp_path).issue("gateway", "g", names=["g"]) / "ca.crt").read_text()
    client_key, clients = key_secret(tmp_path, "clients")
    operator_key, operators = key_secret(tmp_path, "operators", AdminRole.OPERATOR)
    mine: list[Manifest] = [
        clients,
        operators,
        {"kind": "ConfigMap", "metadata": {"name": "authorities"}, "data": {"ca.crt": ca}},
    ]
    folder = tmp_path / "node"
    folder.mkdir()
    image = {image_environment()["PDMESH_MODEL_DIR"]: tmp_path / "model"}
    manifests = [*render("", values_of(provider)), *mine]
    tokens = {user: await asyncio.to_thread(provider.token, user) for user in USERS}
    async with Kubelet(manifests, folder, image) as kubelet:
        await kubelet.start()
        await kubelet.wait_ready([GATEWAY, MASTER])
        await _clients_are_known(kubelet, [client_key, tokens["ann"], tokens["bob"]])
        _operators_are_known(kubelet, tokens, client_key, operator_key)


async def _clients_are_known(kubelet: Kubelet, accepted: list[str]) -> None:
    url = f"http://{kubelet.pods[GATEWAY].ip}:8000/v1/completions"
    body = {"model": "default", "prompt": "hello", "max_tokens": 2}
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:

        async def status(token: str) -> int:
            headers = {"authorization": f"Bearer {token}"} if token else {}
            return (await client.post(url, json=body, headers=headers)).status_code

        for token in accepted:
            # A token gets a 503 until the provider's keys are there.
            async def is_taken(token: str = token) -> bool:
                return await status(token) == 200

            await until(is_taken, 60)
        assert await status("") == 401
        assert await status(f"{accepted[-1][:-4]}AAAA") == 401


def _operators_are_known(
    kubelet: Kubelet, tokens: dict[str, str], client_key: str, operator_key: str
) -> None:
    """Commands run in the master's pod; what they show there comes before the admin token."""

    def asked(token: str, *command: str) -> tuple[bool, str]:
        done = kubelet.run(MASTER, "env", f"PDMESH_TOKEN={token}", "pdmesh", *command)
        return done.returncode == 0, done.stdout + done.stderr

    cordon = ("cordon", kubelet.pods["pdmesh-both"].name)
    for token in (tokens["ann"], operator_key):
        assert asked(token, "groups")[0]
    refused, said = asked(tokens["ann"], *cordon)
    assert not refused
    assert "viewer" in said
    assert asked(operator_key, *cordon)[0]
    for token in (tokens["bob"], client_key):  # a client's key is in another file; bob has no role
        assert not asked(token, "groups")[0]
