"""Checks the chart's objects for the Gateway API Inference Extension. With this extension, a proxy
asks the gateway which endpoint takes a request.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.chart.helm import Manifest, of_kind, pods, render

GATEWAY = "pdmesh-gateway"


def rendered(tls: bool = False, **picker: Any) -> list[Manifest]:
    gateway: dict[str, Any] = {"endpointPicker": {"enabled": True, **picker}}
    if tls:
        gateway["settings"] = {"PICKER_CALLERS": "any"}
        return render("sim", {"gateway": gateway, "tls": {"enabled": True, "issuerName": "mesh"}})
    return render("sim", {"gateway": gateway})


def service(manifests: list[Manifest]) -> Manifest:
    (found,) = (
        s for s in of_kind(manifests, "Service") if s["metadata"]["name"].endswith("-picker")
    )
    return found


def test_without_it_nothing_of_it_is_there() -> None:
    manifests = render("sim")
    assert not of_kind(manifests, "InferencePool")
    assert not any("picker" in str(m).lower() for m in manifests)


def test_the_pool_has_the_gateway_pods_and_their_port_and_names_the_picker() -> None:
    manifests = rendered(failureMode="FailOpen")
    (pool,) = of_kind(manifests, "InferencePool")
    assert pool["apiVersion"] == "inference.networking.k8s.io/v1"
    selector = pool["spec"]["selector"]["matchLabels"]
    matched = [
        n for n, p in pods(manifests).items() if selector.items() <= p["metadata"]["labels"].items()
    ]
    assert matched == [GATEWAY]
    (container,) = pods(manifests)[GATEWAY]["spec"]["containers"]
    ports = {p["name"]: p["containerPort"] for p in container["ports"]}
    assert pool["spec"]["targetPorts"] == [{"number": ports["http"]}]
    picker = service(manifests)
    assert pool["spec"]["endpointPickerRef"] == {
        "name": picker["metadata"]["name"],
        "port": {"number": picker["spec"]["ports"][0]["port"]},
        "failureMode": "FailOpen",
    }
    env = {e["name"]: e.get("value") for e in container["env"]}
    assert env["PDMESH_GATEWAY_PICKER_PORT"] == str(ports["picker"]) == "9002"


@pytest.mark.parametrize("port", [9002, 7002])
def test_the_service_and_the_network_policy_open_the_picker_s_port(port: int) -> None:
    manifests = rendered(port=port)
    (found,) = service(manifests)["spec"]["ports"]
    assert (found["port"], found["targetPort"]) == (port, "picker")
    policies = {p["metadata"]["name"]: p for p in of_kind(manifests, "NetworkPolicy")}
    (rule,) = policies["pdmesh-gateway-clients"]["spec"]["ingress"]
    assert {p["port"] for p in rule["ports"]} == {8000, 8001, port}


@pytest.mark.parametrize(("tls", "expected"), [(False, "kubernetes.io/h2c"), (True, None)])
def test_the_service_says_how_proxies_speak_to_it(tls: bool, expected: str | None) -> None:
    (found,) = service(rendered(tls))["spec"]["ports"]
    assert found.get("appProtocol") == expected


def test_proxies_that_are_configured_by_hand_need_no_pool() -> None:
    manifests = rendered(inferencePool=False)
    assert not of_kind(manifests, "InferencePool")
    assert service(manifests)
