"""Checks how the chart's services identify their callers, by API keys or by the tokens of an OpenID
provider.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx

from pdmesh import api_keys
from pdmesh.api_keys import KeyFile
from pdmesh.core.tenancy.tenant import TenantEntry
from pdmesh.engine.sim_tokenizer import write_sim_model
from tests.support.chart.helm import Manifest, pods, render
from tests.support.chart.kubelet import Kubelet, image_environment
from tests.support.sites.oidc_provider import AUDIENCE, oidc_provider

GATEWAY, MASTER = "pdmesh-gateway", "pdmesh-master-scheduler"
ISSUER = "https://id.example.org/realms/mesh"
OIDC = {"issuer": ISSUER, "audience": AUDIENCE}
OUT = {"extraEgress": [{"ports": [{"port": 443, "protocol": "TCP"}]}]}
ALL_KEYS = {"gateway": {"keysSecret": "clients"}, "masterScheduler": {"keysSecret": "operators"}}


def spec_of(manifests: list[Manifest], name: str) -> dict[str, Any]:
    found: dict[str, Any] = pods(manifests)[name]["spec"]
    return found


def environment(manifests: list[Manifest], name: str) -> dict[str, str]:
    (container,) = spec_of(manifests, name)["containers"]
    return {e["name"]: e.get("value", "") for e in container["env"]}


def secrets_at(manifests: list[Manifest], name: str) -> dict[str, str]:
    """The names of the mounted Secrets, by mount path."""
    spec = spec_of(manifests, name)
    named = {v["name"]: v["secret"]["secretName"] for v in spec["volumes"] if "secret" in v}
    (container,) = spec["containers"]
    return {
        m["mountPath"]: named[m["name"]] for m in container["volumeMounts"] if m["name"] in named
    }


def test_gateways_and_masters_get_keys_and_the_provider_and_no_other_pod() -> None:
    oidc = {**OIDC, "caSecret": "provider"}
    manifests = render("", {"oidc": oidc, "networkPolicy": OUT, **ALL_KEYS})
    for name, prefix, keys in (
        (GATEWAY, "PDMESH_GATEWAY_", "clients"),
        (MASTER, "PDMESH_MASTER_SCHEDULER_", "operators"),
    ):
        found = environment(manifests, name)
        assert found["PDMESH_OIDC_ISSUER"] == ISSUER
        assert found["PDMESH_OIDC_AUDIENCE"] == AUDIENCE
        assert found["PDMESH_OIDC_CA_FILE"] == "/etc/pdmesh/oidc/ca.crt"
        assert found[f"{prefix}KEYS_FILE"] == "/etc/pdmesh/keys/keys.json"
        mounted = {"/etc/pdmesh/keys": keys, "/etc/pdmesh/oidc": "provider"}
        assert secrets_at(manifests, name) == mounted
    for name in pods(manifests).keys() - {GATEWAY, MASTER}:
        assert not [k for k in environment(manifests, name) if "OIDC" in k or "KEYS" in k]
        assert not secrets_at(manifests, name)


def test_without_keys_and_a_provider_nothing_of_them_is_there() -> None:
    manifests = render("", {"gateway": {"allowAnonymous": True}})
    for name in (GATEWAY, MASTER):
        assert not [k for k in environment(manifests, name) if "OIDC" in k or "KEYS" in k]
        assert not secrets_at(manifests, name)


async def test_tokens_and_keys_admit_to_the_chart_s_gateway_and_master(tmp_path: Path) -> None:
    write_sim_model(tmp_path / "model")
    values = {
        **ALL_KEYS,
        "oidc": OIDC,
        "networkPolicy": OUT,
        "kv": {"netDevices": "lo"},
        "settings": {"SIM_LAW": "zero", "OIDC_ROLE_CLAIM": "roles"},
        "pools": {
            "prefill": None,
            "decode": None,
            "fusion": {"role": "fusion", "replicas": 1, "drainSeconds": 1},
        },
    }
    folder = tmp_path / "node"
    folder.mkdir()
    file = KeyFile(tenants={"keyed": TenantEntry()})
    key = api_keys.issue(file, "keyed")
    image = {image_environment()["PDMESH_MODEL_DIR"]: tmp_path / "model"}
    olga = {"tenant": "ops", "roles": ["pdmesh-viewer"]}
    with oidc_provider(tmp_path, ann={"tenant": "acme"}, olga=olga) as provider:
        async with Kubelet(render("", values), folder, image) as kubelet:
            for name in (GATEWAY, MASTER):
                pod = kubelet.pods[name]
                api_keys.save(pod.mounts["/etc/pdmesh/keys"] / "keys.json", file)
                assert pod.environment["PDMESH_OIDC_ISSUER"] == ISSUER
                pod.environment["PDMESH_OIDC_ISSUER"] = provider.issuer
            await kubelet.start()
            await kubelet.wait_ready([GATEWAY, MASTER, "pdmesh-fusion"])
            url = f"http://{kubelet.pods[GATEWAY].ip}:8000/v1/completions"
            body = {"model": "default", "prompt": "hello", "max_tokens": 2}
            async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
                for shown, expected in ((provider.token("ann"), 200), (key, 200), ("guess", 401)):
                    headers = {"authorization": f"Bearer {shown}"}
                    answer = await client.post(url, json=body, headers=headers)
                    assert answer.status_code == expected, answer.text
            token = provider.token("olga")
            status = kubelet.run(MASTER, "env", f"PDMESH_ADMIN_TOKEN={token}", "pdmesh", "status")
            assert status.returncode == 0, status.stderr
            denied = kubelet.run(
                MASTER, "env", f"PDMESH_ADMIN_TOKEN={token}", "pdmesh", "cordon",
                f"{kubelet.pods['pdmesh-fusion'].name}",
            )  # fmt: skip
            assert denied.returncode != 0
            assert "viewer" in denied.stderr, denied.stderr
