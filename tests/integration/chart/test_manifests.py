"""Checks the manifests that the chart renders.

They must be valid for Kubernetes, need no privileges, and open only the ports that must be open. A
pod must end only after it has drained.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from pdmesh.engine.vllm.child.llm_process import BUILD_STOP_S, STOP_TIMEOUT_S
from pdmesh.launcher.spec import STOP_GRACE_S, StopOrder
from pdmesh.services.gateway.settings import Settings as GatewaySettings
from pdmesh.services.instance.settings import Settings as InstanceSettings
from pdmesh.telemetry import names as metric_names
from tests.support.chart import helm
from tests.support.chart.helm import CHART, VALUE_SETS, Manifest, of_kind, pods, render, services

# The oldest version that the chart supports, the maintained versions, and the newest known schemas.
KUBERNETES = ("1.29", "1.33", "1.35", "1.37")
# Custom resources. Their schemas come with the operators that define them.
CUSTOM = {"ServiceMonitor", "PrometheusRule", "ScaledObject", "InferencePool"}
OBSERVE = helm.ROOT / "deploy/observe"
MARGIN_S = 3  # how many seconds longer than the drain the launcher waits for a process to end


def validated(manifests: list[Manifest], folder: Path, version: str) -> list[str]:
    """The faults of the manifests, in the words of kubernetes-validate."""
    file = folder / "manifests.yaml"
    file.write_text(yaml.safe_dump_all(manifests))
    done = subprocess.run(
        [sys.executable, "-m", "kubernetes_validate", "-k", version, "--strict", str(file)],
        env={**os.environ, "PYTHONPATH": str(helm.schemas())},
        capture_output=True,
        text=True,
        check=False,
    )
    said = (done.stdout + done.stderr).splitlines()
    passed = [line for line in said if " passed for resource " in line]
    failed = [line for line in said if line not in passed]
    assert len(passed) == len(manifests) or failed, said
    return failed


def rendered(value_set: str, kubernetes: str = "1.35") -> list[Manifest]:
    """The manifests of one example. `tls` is the example `sim` with certificates for the services
    and NATS.
    """
    if value_set == "tls":
        secure = {"tls": {"enabled": True, "issuerName": "mesh"}}
        return render("sim", secure, kubernetes=kubernetes)
    return render(value_set, kubernetes=kubernetes)


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("value_set", [*VALUE_SETS, "tls"])
def test_the_manifests_are_valid_for_every_version_of_kubernetes_in_use(
    tmp_path: Path, value_set: str, version: str
) -> None:
    known = [m for m in rendered(value_set, version) if m["kind"] not in CUSTOM]
    assert validated(known, tmp_path, version) == []


def test_a_field_that_kubernetes_does_not_know_is_found(tmp_path: Path) -> None:
    manifests = render("sim")
    pod = next(iter(pods(manifests).values()))
    pod["spec"]["enableServiceLink"] = False
    failed = validated(manifests, tmp_path, "1.35")
    assert any("enableServiceLink" in line for line in failed)


@pytest.mark.parametrize("value_set", [*VALUE_SETS, "tls"])
def test_no_container_has_privileges_or_writes_to_its_image(value_set: str) -> None:
    for name, pod in pods(rendered(value_set)).items():
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"], name
        assert spec["securityContext"]["runAsUser"] == 10001
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is False
        assert spec["enableServiceLinks"] is False
        assert not {"hostNetwork", "hostPID", "hostIPC", "initContainers"} & set(spec)
        assert not any("hostPath" in volume for volume in spec["volumes"]), name
        for container in spec["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert container["resources"]["limits"]["memory"], name


@pytest.mark.parametrize("value_set", VALUE_SETS)
def test_secrets_come_from_the_secret_and_only_to_those_that_read_them(value_set: str) -> None:
    readers: dict[str, set[str]] = {}
    for pod in pods(render(value_set)).values():
        for each in pod["spec"]["containers"][0]["env"]:
            if re.search("TOKEN|SECRET|PASSWORD|_URL$", each["name"]):
                source = each.get("valueFrom", {}).get("secretKeyRef")
                assert source or each["value"] == '"$(PASSWORD)"', each
                readers.setdefault(each["name"], set()).add(helm.component(pod))
    assert readers["PDMESH_ADMIN_TOKEN"] <= {"master-scheduler", "desired-state"}
    assert readers["PDMESH_HASH_SECRET"] == {"gateway", "master-scheduler"}
    assert readers["PDMESH_REDIS_URL"] == {"gateway", "kv-cache-index"}


@pytest.mark.parametrize("value_set", VALUE_SETS)
def test_every_service_has_its_probes_and_time_to_load(value_set: str) -> None:
    for name, pod in services(render(value_set)).items():
        (container,) = pod["spec"]["containers"]
        ports = {port["name"] for port in container["ports"]}
        for probe, path in (
            ("readinessProbe", "/health/ready"),
            ("livenessProbe", "/health/live"),
        ):
            assert container[probe]["httpGet"]["path"] == path
            assert container[probe]["httpGet"]["port"] in ports
        # An instance is ready once its model is loaded, and its start then ends. A gateway is ready
        # only when an instance serves, so its start must not wait for that.
        is_instance = helm.component(pod) == "instance"
        expected = "/health/ready" if is_instance else "/health/live"
        assert container["startupProbe"]["httpGet"]["path"] == expected, name


@pytest.mark.parametrize("value_set", VALUE_SETS)
def test_a_pod_ends_after_its_drain_and_a_gateway_after_the_load_balancers_know(
    value_set: str,
) -> None:
    manifests = render(value_set)
    for name, pod in services(manifests).items():
        (container,) = pod["spec"]["containers"]
        env = {each["name"]: each.get("value") for each in container["env"]}
        drains = [float(value) for key, value in env.items() if key.endswith("_DRAIN_S")]
        grace = pod["spec"]["terminationGracePeriodSeconds"]
        before = 0
        if helm.component(pod) == "gateway":
            command = container["lifecycle"]["preStop"]["exec"]["command"]
            assert command[0] == "sleep"
            before = int(command[1])
            assert before > 0
        if helm.component(pod) in ("gateway", "instance"):
            assert grace >= before + drains[0] + MARGIN_S, name
        # An instance stops vLLM after the drain. An instance that still loads has nothing to drain.
        if helm.component(pod) == "instance":
            assert grace >= drains[0] + STOP_TIMEOUT_S + MARGIN_S, name
            assert grace >= BUILD_STOP_S + STOP_TIMEOUT_S + MARGIN_S, name
        if helm.component(pod) not in ("gateway", "instance"):
            assert not drains
            assert grace >= STOP_GRACE_S[StopOrder.CONTROL]


def test_a_part_of_a_second_of_drain_counts() -> None:
    values = {"gateway": {"drainSeconds": 9.5}, "poolDefaults": {"drainSeconds": 9.5}}
    whole = services(render("sim", {k: {"drainSeconds": 10} for k in values}))
    for name, pod in services(render("sim", values)).items():
        grace = pod["spec"]["terminationGracePeriodSeconds"]
        assert grace == whole[name]["spec"]["terminationGracePeriodSeconds"], name


def test_a_rollout_of_gateways_may_take_as_long_as_the_slowest_pool_needs_to_load() -> None:
    """A gateway becomes ready when an instance serves. By default, Kubernetes gives a rollout 600
    s.
    """
    values = {"pools": {"decode": {"startupSeconds": 1200}}}
    for value_set, slowest_s in (("vllm-cpu", 1200), ("gpu", 1800)):
        manifests = render(value_set, values)
        found = {each["metadata"]["name"]: each for each in of_kind(manifests, "Deployment")}
        gateway = found["pdmesh-gateway"]
        (container,) = gateway["spec"]["template"]["spec"]["containers"]
        probe = container["startupProbe"]
        own_s = probe["failureThreshold"] * probe["periodSeconds"]
        assert gateway["spec"]["progressDeadlineSeconds"] > own_s + slowest_s


def test_the_drain_times_are_the_product_s_own_and_so_is_the_margin() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    drain_s = GatewaySettings.model_fields["drain_s"].default
    assert values["gateway"]["drainSeconds"] == drain_s
    assert (
        values["poolDefaults"]["drainSeconds"] == InstanceSettings.model_fields["drain_s"].default
    )
    assert STOP_GRACE_S[StopOrder.GATEWAY] == STOP_GRACE_S[StopOrder.INSTANCE] == drain_s + MARGIN_S


@pytest.mark.parametrize("value_set", VALUE_SETS)
def test_selectors_match_their_own_pods_and_no_others(value_set: str) -> None:
    manifests = render(value_set)
    labels = {name: pod["metadata"]["labels"] for name, pod in pods(manifests).items()}
    for workload in of_kind(manifests, "Deployment", "StatefulSet", "DaemonSet"):
        selector = workload["spec"]["selector"]["matchLabels"]
        assert _matched(selector, labels) == {workload["metadata"]["name"]}
    for budget in of_kind(manifests, "PodDisruptionBudget"):
        name = budget["metadata"]["name"]
        assert _matched(budget["spec"]["selector"]["matchLabels"], labels) == {name}
    for service in of_kind(manifests, "Service"):
        targets = {port["targetPort"] for port in service["spec"]["ports"]}
        matched = _matched(service["spec"]["selector"], labels)
        ports = [
            {p["name"] for p in pods(manifests)[name]["spec"]["containers"][0].get("ports", [])}
            for name in matched
        ]
        assert any(targets <= each for each in ports), service["metadata"]["name"]


def _matched(selector: dict[str, str], labels: dict[str, dict[str, str]]) -> set[str]:
    return {name for name, given in labels.items() if selector.items() <= given.items()}


def _admits(policy: Manifest, labels: dict[str, str]) -> bool:
    """Whether the policy applies to a pod with these labels."""
    selector = policy["spec"]["podSelector"]
    return selector["matchLabels"].items() <= labels.items() and all(
        labels.get(each["key"]) in each["values"] for each in selector.get("matchExpressions", [])
    )


@pytest.mark.parametrize("value_set", VALUE_SETS)
def test_network_policies_open_exactly_the_ports_on_which_a_pod_listens(value_set: str) -> None:
    manifests = render(value_set)
    policies = of_kind(manifests, "NetworkPolicy")
    for name, pod in pods(manifests).items():
        about = [p for p in policies if _admits(p, pod["metadata"]["labels"])]
        types = {kind for p in about for kind in p["spec"]["policyTypes"]}
        assert types == {"Ingress", "Egress"}, name
        opened = {
            (port["port"], port.get("endPort", port["port"]))
            for p in about
            for rule in p["spec"].get("ingress", [])
            for port in rule["ports"]
        }
        listening = {
            (port["containerPort"],) * 2 for port in pod["spec"]["containers"][0].get("ports", [])
        }
        if helm.component(pod) == "instance":
            listening.add((20000, 20999))
        assert opened == listening, name


def test_only_gateways_are_open_to_everybody_and_only_instances_exchange_kv() -> None:
    """In a network policy, a rule without `from` admits everybody."""
    policies = {p["metadata"]["name"]: p for p in of_kind(render("sim"), "NetworkPolicy")}
    for name, policy in policies.items():
        for rule in policy["spec"].get("ingress", []):
            assert ("from" not in rule) == (name == "pdmesh-gateway-clients"), name
    (kv,) = policies["pdmesh-kv"]["spec"]["ingress"]
    (peers,) = kv["from"]
    (expression,) = peers["podSelector"]["matchExpressions"]
    assert expression["values"] == ["instance"]
    (rule,) = policies["pdmesh-redis"]["spec"]["ingress"]
    (expression,) = rule["from"][0]["podSelector"]["matchExpressions"]
    assert sorted(expression["values"]) == ["gateway", "kv-cache-index"]


def test_pods_are_spread_by_region_and_rack_and_a_pool_stays_in_its_region() -> None:
    manifests = render("vllm-cpu", {"topology": {"rackLabel": "example.org/rack"}})
    keys = {
        name: [c["topologyKey"] for c in pod["spec"].get("topologySpreadConstraints", [])]
        for name, pod in services(manifests).items()
    }
    everywhere = ["topology.kubernetes.io/region", "example.org/rack", "kubernetes.io/hostname"]
    assert keys["pdmesh-gateway"] == keys["pdmesh-master-scheduler"] == everywhere
    assert keys["pdmesh-prefill"] == keys["pdmesh-decode"] == everywhere[1:]


def test_region_and_rack_come_from_the_pod_s_labels_unless_the_values_name_them() -> None:
    values: dict[str, Any] = {"topology": {"fromPodLabels": True}, "settings": {"REGION": "eu"}}
    env = _environment(render("vllm-cpu", values), "pdmesh-prefill")
    path = "metadata.labels['topology.kubernetes.io/zone']"
    assert env["PDMESH_RACK"] == {"fieldRef": {"fieldPath": path}}
    assert env["PDMESH_REGION"] == "eu"
    del values["settings"]
    gateway = _environment(render("vllm-cpu", values), "pdmesh-gateway")
    path = "metadata.labels['topology.kubernetes.io/region']"
    assert gateway["PDMESH_REGION"] == {"fieldRef": {"fieldPath": path}}
    assert "PDMESH_RACK" not in gateway


def _environment(manifests: list[Manifest], name: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for each in pods(manifests)[name]["spec"]["containers"][0]["env"]:
        assert each["name"] not in found, each
        found[each["name"]] = each.get("value", each.get("valueFrom"))
    return found


def test_what_scales_has_no_number_of_replicas_and_asks_for_metrics_that_exist() -> None:
    manifests = render("gpu")
    scaled = of_kind(manifests, "ScaledObject", "HorizontalPodAutoscaler")
    targets = {s["spec"]["scaleTargetRef"]["name"]: s for s in scaled}
    assert sorted(targets) == ["pdmesh-blank", "pdmesh-gateway"]
    for deployment in of_kind(manifests, "Deployment"):
        name = deployment["metadata"]["name"]
        assert ("replicas" in deployment["spec"]) == (name not in targets)
    blank = targets["pdmesh-blank"]["spec"]
    behavior = blank["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    # A scale-down would end busy instances.
    assert behavior["scaleDown"] == {"selectPolicy": "Disabled"}
    known = {
        value.replace(".", "_")
        for value in vars(metric_names).values()
        if isinstance(value, str) and value.startswith("pdmesh.")
    }
    (trigger,) = blank["triggers"]
    asked = set(re.findall(r"pdmesh_\w+", trigger["metadata"]["query"]))
    assert asked
    assert asked <= known


def test_prometheus_gets_the_alerts_and_the_labels_that_they_and_the_dashboards_need() -> None:
    """docs/observe.md says that Prometheus' label `job` is pdmesh, and that its label `instance` is
    the name of the process.
    """
    manifests = render("gpu")
    (monitor,) = of_kind(manifests, "ServiceMonitor")
    (endpoint,) = monitor["spec"]["endpoints"]
    assert {"targetLabel": "job", "replacement": "pdmesh"} in endpoint["relabelings"]
    (named,) = (each for each in endpoint["relabelings"] if each["targetLabel"] == "instance")
    assert named["sourceLabels"] == ["__meta_kubernetes_pod_name"]
    (scraped,) = (
        service
        for service in of_kind(manifests, "Service")
        if monitor["spec"]["selector"]["matchLabels"].items()
        <= service["metadata"]["labels"].items()
    )
    assert endpoint["port"] in {port["name"] for port in scraped["spec"]["ports"]}
    (rules,) = of_kind(manifests, "PrometheusRule")
    assert rules["spec"] == yaml.safe_load((OBSERVE / "prometheus/rules.yml").read_text())
    shown = {
        name: text
        for config in of_kind(manifests, "ConfigMap")
        if config["metadata"]["labels"].get("grafana_dashboard") == "1"
        for name, text in config["data"].items()
    }
    dashboards = {file.name: file.read_text() for file in OBSERVE.glob("grafana/dashboards/*.json")}
    assert shown == dashboards != {}


@pytest.mark.parametrize("value_set", VALUE_SETS)
def test_helm_finds_nothing_to_complain_about(value_set: str) -> None:
    """Helm's linter also renders NOTES.txt."""
    values = str(CHART / f"values-{value_set}.yaml")
    command = [str(helm.helm()), "lint", "--strict", str(CHART), "--values", values]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "1 chart(s) linted, 0 chart(s) failed" in done.stdout


def test_pod_names_are_instance_ids_whatever_the_release_is_called() -> None:
    for release in ("my.mesh", "a-release-with-a-name-of-fifty-three-characters-in-al"):
        for name in pods(render("sim", release=release)):
            pod = f"{name}-7d9c5b8f4f-x2x7k"
            assert len(pod) <= 63
            assert re.fullmatch(
                InstanceSettings.model_fields["instance_id"].metadata[0].pattern, pod
            )


def test_a_new_version_of_the_chart_alone_restarts_nothing() -> None:
    for pod in pods(render("gpu")).values():
        assert not any(
            "helm.sh" in label or "version" in label for label in pod["metadata"]["labels"]
        )
