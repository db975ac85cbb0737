"""Checks that the chart refuses bad values by name, before it installs anything."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from pdmesh import desired_file
from tests.support.chart.helm import ROOT, Refused, of_kind, pods, render

OPEN: dict[str, Any] = {"gateway": {"allowAnonymous": True}}
ISSUER = "https://id.example.org"


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"gatway": {}}, "gatway is not allowed"),
        ({"gateway": {"replicas": "two"}}, "gateway.replicas: Invalid type"),
        ({"gateway": {"settings": {"MAX_CALS": 1}}}, "MAX_CALS is not allowed"),
        ({"gateway": {"settings": {"MAX_CALLS": "x"}}}, "gateway.settings.MAX_CALLS: Invalid type"),
        ({"gateway": {"settings": {"MAX_CALLS": 0}}}, "settings.MAX_CALLS: Must be greater"),
        ({"gateway": {"endpointPicker": {"failureMode": "Open"}}}, "endpointPicker.failureMode"),
        ({"gateway": {"endpointPicker": {"port": 0}}}, "endpointPicker.port"),
        (
            {"gateway": {"endpointPicker": {"enabled": True, "port": 9100}}},
            "gateway.endpointPicker.port: 9100 is another port",
        ),
        ({"gateway": {"settings": {"PICKER_PORT": 9002}}}, "PICKER_PORT is not allowed"),
        ({"gateway": {"settings": {"PICKER_CALLERS": "all"}}}, "settings.PICKER_CALLERS"),
        (
            {
                "gateway": {"endpointPicker": {"enabled": True}},
                "tls": {"enabled": True, "issuerName": "mesh"},
            },
            "gateway.settings.PICKER_CALLERS",
        ),
        ({"settings": {"LOG_LEVEL": "loud"}}, "settings.LOG_LEVEL"),
        ({"settings": {"HASH_SECRET": "in plain text"}}, "HASH_SECRET is not allowed"),
        ({"pools": {"decode": {"settings": {"KV_CACHE_BYTES": -1}}}}, "KV_CACHE_BYTES"),
        ({"pools": {"decode": {"role": "decoder"}}}, "pools.decode.role"),
        ({"pools": {"extra": {"role": "decode"}}}, "replicas is required"),
        ({"pools": {"gateway": {"role": "decode", "replicas": 1}}}, 'name of "gateway"'),
        ({"pools": {"decode": {"sharedMemory": "lots"}}}, "pools.decode.sharedMemory"),
        ({"extraEnv": [{"name": "PDMESH_LOG_LEVEL", "value": "debug"}]}, "extraEnv.0.name"),
        ({"kv": {"firstPort": 70000}}, "kv.firstPort"),
        ({"image": {"digest": "latest"}}, "image.digest"),
        ({"desiredState": {"group": {}}}, "group is not allowed"),
        # The chart's schema cannot express these rules.
        ({"gateway": {"allowAnonymous": False}}, "gateway.keysSecret"),
        ({"oidc": {"issuer": "http://id.example.org"}}, "oidc.issuer"),
        ({"oidc": {"issuer": ISSUER, "audience": "a"}}, "networkPolicy.extraEgress"),
        ({"oidc": {"issuer": ISSUER}, "networkPolicy": {"enabled": False}}, "oidc.audience"),
        ({"oidc": {"audience": "a"}}, "oidc.issuer: audience and caSecret say nothing"),
        ({"settings": {"OIDC_ISSUER": ISSUER}}, "OIDC_ISSUER is not allowed"),
        ({"tls": {"enabled": True}}, "tls.issuerName"),
        ({"settings": {"INSECURE_NETWORK": False}}, "INSECURE_NETWORK: without tls.enabled"),
        (
            {"settings": {"INSECURE_NETWORK": False}, "tls": {"enabled": True, "issuerName": "m"}},
            "INSECURE_NETWORK: the chart's own redis has no TLS",
        ),
        ({"nats": {"enabled": False}, "networkPolicy": {"enabled": False}}, "nats.url"),
        ({"redis": {"enabled": False, "url": "redis://r:6379"}}, "networkPolicy.extraEgress"),
        ({"pools": {"decode": {"autoscaling": {"enabled": True}}}}, "decode.autoscaling.query"),
        (
            {"poolDefaults": {"podDisruptionBudget": {"maxUnavailable": 1, "minAvailable": 1}}},
            "poolDefaults.podDisruptionBudget: name maxUnavailable or minAvailable",
        ),
        (
            {
                "pools": {
                    "decode": {"podDisruptionBudget": {"maxUnavailable": 1, "minAvailable": 1}}
                }
            },
            "pools.decode.podDisruptionBudget: name maxUnavailable or minAvailable",
        ),
    ],
)  # fmt: skip
def test_a_bad_value_is_refused_by_its_name(values: dict[str, Any], named: str) -> None:
    merged = {**OPEN, **values}
    if "gateway" in values:
        merged["gateway"] = {**OPEN["gateway"], **values["gateway"]}
    with pytest.raises(Refused) as refused:
        render("", merged)
    assert named in str(refused.value)


def test_settings_reach_their_service_as_it_reads_them() -> None:
    """Helm by itself would write 8589934592 as 8.589934592e+09."""
    values = {
        **OPEN,
        "settings": {"LOG_LEVEL": "debug"},
        "pools": {
            "decode": {
                "settings": {
                    "KV_CACHE_BYTES": 8589934592,
                    "ENGINE_ARGS": {"quantization": "awq", "max_seq_len_to_capture": 1048576},
                    "SPECULATIVE_ACCEPTANCE": 0.75,
                    "ENABLE_LORA": True,
                    "MODEL_DIR": "/models/a",
                }
            }
        },
    }
    container = pods(render("", values))["pdmesh-decode"]["spec"]["containers"][0]
    env = {each["name"]: each.get("value") for each in container["env"]}
    assert env["PDMESH_LOG_LEVEL"] == "debug"
    assert env["PDMESH_DECODE_KV_CACHE_BYTES"] == "8589934592"
    assert (
        env["PDMESH_DECODE_ENGINE_ARGS"]
        == '{"max_seq_len_to_capture":1048576,"quantization":"awq"}'
    )
    assert env["PDMESH_DECODE_SPECULATIVE_ACCEPTANCE"] == "0.75"
    assert env["PDMESH_DECODE_ENABLE_LORA"] == "true"
    assert env["PDMESH_DECODE_MODEL_DIR"] == "/models/a"


def test_an_external_server_replaces_the_chart_s_own() -> None:
    values = {
        **OPEN,
        "nats": {"enabled": False, "url": "nats://mesh:secret@nats.example.org:4222"},
        "redis": {"enabled": False, "url": "redis://:secret@redis.example.org:6379/0"},
        "networkPolicy": {"extraEgress": [{"to": [{"ipBlock": {"cidr": "10.1.0.0/16"}}]}]},
    }
    manifests = render("", values)
    assert not of_kind(manifests, "StatefulSet")
    assert "pdmesh-redis" not in pods(manifests)
    (secret,) = of_kind(manifests, "Secret")
    assert secret["stringData"]["nats-url"] == values["nats"]["url"]
    assert secret["stringData"]["redis-url"] == values["redis"]["url"]


def test_with_a_secret_of_one_s_own_the_chart_makes_none() -> None:
    manifests = render("gpu")
    assert not of_kind(manifests, "Secret")
    for pod in pods(manifests).values():
        for each in pod["spec"]["containers"][0]["env"]:
            if source := each.get("valueFrom", {}).get("secretKeyRef"):
                assert source["name"] == "pdmesh"


def test_the_desired_state_arrives_as_it_was_written() -> None:
    """The text has every field of docs/groups.md, and a number that Helm would write with an
    exponent.
    """
    text = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/groups.md").read_text(), re.DOTALL)[1]
    state = yaml.safe_load(text)
    state["services"]["assistant"]["options"]["kv_host_pool_bytes"] = 17179869184
    manifests = render("", {**OPEN, "desiredState": state})
    config = next(each for each in of_kind(manifests, "ConfigMap") if "groups.yaml" in each["data"])
    assert desired_file.read(config["data"]["groups.yaml"]) == desired_file.read(
        yaml.safe_dump(state)
    )


def test_a_changed_desired_state_is_a_new_job_and_so_is_a_changed_pod() -> None:
    """Kubernetes refuses to change a Job. So `helm upgrade` with another image would fail if the
    Job kept its name.
    """

    def job(decode: int, tag: str = "sim") -> str:
        state = {"groups": {"chat": {"prefill": 2, "decode": decode}}}
        values = {"desiredState": state, "image": {"tag": tag}}
        (found,) = of_kind(render("sim", values), "Job")
        return str(found["metadata"]["name"])

    assert job(2) == job(2)
    assert len({job(2), job(3), job(2, tag="next")}) == 3


def test_a_disruption_budget_has_one_bound_and_a_pool_s_own_replaces_the_defaults() -> None:
    """Kubernetes refuses a budget with both bounds. By itself, Helm would merge the pool's bound
    with the other bound of the defaults.
    """

    def budgets(values: dict[str, Any]) -> dict[str, dict[str, Any]]:
        found = of_kind(render("", {**OPEN, **values}), "PodDisruptionBudget")
        bounds = ("maxUnavailable", "minAvailable")
        return {
            each["metadata"]["name"].removeprefix("pdmesh-"): {
                bound: each["spec"][bound] for bound in bounds if bound in each["spec"]
            }
            for each in found
        }

    default = {"maxUnavailable": 1}
    assert set(map(str, budgets({}).values())) == {str(default)}
    own = budgets({"pools": {"decode": {"podDisruptionBudget": {"minAvailable": "50%"}}}})
    assert own["decode"] == {"minAvailable": "50%"}
    assert own["prefill"] == default
    both = budgets(
        {
            "poolDefaults": {"podDisruptionBudget": {"minAvailable": 1}},
            "pools": {"decode": {"podDisruptionBudget": {"maxUnavailable": 0}}},
        }
    )
    assert both["prefill"] == {"minAvailable": 1}
    assert both["decode"] == {"maxUnavailable": 0}
