"""Checks that every variable that the chart sets is a setting that its container reads, and that
the container accepts the value.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from pdmesh import service_process
from pdmesh.config import SHARED_PREFIX, ServiceSettings, is_shared, unknown_variables
from pdmesh.services.gateway.settings import Settings as GatewaySettings
from tests.support.chart import helm
from tests.support.chart.helm import CHART, VALUE_SETS, Manifest, pods, render
from tests.support.chart.kubelet import Kubelet, image_environment
from tools.configuration_doc import SERVICES, settings_of

# Variables of programs that are not part of the mesh.
OTHERS = re.compile(r"HOME|PASSWORD|NATS_PASSWORD|REDISCLI_AUTH|UCX_\w+|NVIDIA_\w+")
OF_PRODUCT = {
    "pdmesh-gateway": "gateway",
    "pdmesh-master-scheduler": "master_scheduler",
    "pdmesh-kv-cache-index": "kv_cache_index",
    "pdmesh-health-monitor": "health_monitor",
    "pdmesh-health-monitor --node": "node_agent",
    "pdmesh-prefill": "prefill",
    "pdmesh-decode": "decode",
    "pdmesh-instance": "instance",
}
EVERYTHING: dict[str, Any] = {
    "gateway": {
        "allowAnonymous": True,
        "endpointPicker": {"enabled": True},
        "settings": {"PICKER_CALLERS": "any"},
    },
    "nodeAgent": {"enabled": True, "deviceHostPath": "/var/lib/devices"},
    "tls": {"enabled": True, "issuerName": "mesh"},
    "topology": {"fromPodLabels": True},
    "settings": {"LOG_LEVEL": "debug", "SIM_LAW": "zero"},
    "pools": {
        role: {"role": role, "replicas": 1} for role in ("fusion", "encoder", "pooling", "blank")
    },
}


def settings_type(container: Manifest) -> type[ServiceSettings] | None:
    """The settings that the container's command reads, or None if the container is no service of
    the mesh.
    """
    service = OF_PRODUCT.get(" ".join(container["command"]))
    return settings_of(service) if service else None


def shared_of(*services: type[ServiceSettings]) -> set[str]:
    return {
        SHARED_PREFIX + name.upper()
        for service in services
        for name, field in service.model_fields.items()
        if is_shared(field)
    }


def unknown(container: Manifest, for_all: frozenset[str] = frozenset()) -> Iterator[str]:
    """Variables of the mesh that the container does not read.

    The values give the variables of `for_all` to all services. For each of them it is enough that
    one service reads it.
    """
    own = settings_type(container)
    every = shared_of(*map(settings_of, SERVICES))
    read = shared_of(own) | (for_all & every) if own else every
    if own:
        prefix = str(own.model_config["env_prefix"])
        read |= {prefix + name.upper() for name in own.model_fields}
    for each in container["env"]:
        name = each["name"]
        if not OTHERS.fullmatch(name) and name not in read:
            yield name


def given_to_all(value_set: str) -> frozenset[str]:
    file = CHART / f"values-{value_set}.yaml"
    values = yaml.safe_load(file.read_text()) if file.exists() else EVERYTHING
    return frozenset(SHARED_PREFIX + name for name in values.get("settings", {}))


@pytest.mark.parametrize("value_set", [*VALUE_SETS, "everything"])
def test_every_variable_is_a_setting_of_the_service_that_gets_it(value_set: str) -> None:
    manifests = render("", EVERYTHING) if value_set == "everything" else render(value_set)
    for name, pod in pods(manifests).items():
        found = unknown(pod["spec"]["containers"][0], given_to_all(value_set))
        assert list(found) == [], name


def test_a_variable_of_another_service_or_with_a_misspelled_name_is_found() -> None:
    pod = pods(render("vllm-cpu"))["pdmesh-decode"]
    container = pod["spec"]["containers"][0]
    wrong = ["PDMESH_GATEWAY_DRAIN_S", "PDMESH_DECODE_DRIAN_S", "PDMESH_HASH_SECRET", "HOEM"]
    container["env"] = [*container["env"], *({"name": name, "value": "1"} for name in wrong)]
    assert list(unknown(container)) == wrong
    container["env"] = container["env"][: -len(wrong)]


@pytest.mark.parametrize("value_set", [*VALUE_SETS, "everything"])
def test_every_service_takes_the_values_that_it_gets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value_set: str
) -> None:
    secret = {"nats-url": "tls://mesh:secret@nats:4222", "redis-url": "rediss://:secret@redis:6379"}
    secret |= dict.fromkeys(("mesh-token", "hash-secret", "admin-token"), "s" * 40)
    mine: Manifest = {"kind": "Secret", "metadata": {"name": "pdmesh"}, "stringData": secret}
    manifests = render("", EVERYTHING) if value_set == "everything" else render(value_set)
    # Some checks of a process depend on its own address, which is not loopback in a cluster. The
    # addresses in test_pods_start are loopback.
    kubelet = Kubelet([*manifests, mine], tmp_path, net="10.1.2")
    for variable in (*image_environment(), "PDMESH_MESH_TOKEN"):
        monkeypatch.delenv(variable, raising=False)
    loaded = 0
    for name, pod in kubelet.pods.items():
        found = settings_type(pod.container)
        if found is None:
            continue
        with monkeypatch.context() as patch:
            for variable, value in pod.environment.items():
                patch.setenv(variable, value)
            settings = found.load()
        assert unknown_variables(found, pod.environment) == [], name
        assert settings.instance_id == pod.name
        assert settings.node == "ip-10-0-0-1-example-internal"
        assert settings.reachable_host == pod.ip
        service_process._check_network(settings)
        assert settings.read_mesh_token()
        if isinstance(settings, GatewaySettings):
            assert settings.keys_file or settings.allow_anonymous
        loaded += 1
    assert loaded == len(helm.services(manifests))
