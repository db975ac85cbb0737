"""Renders the chart in deploy/helm/pdmesh with Helm.

`requirements/chart.sh` installs Helm. Without Helm, the test is skipped.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

ROOT: Final = Path(__file__).parents[3]
CHART: Final = ROOT / "deploy/helm/pdmesh"
TOOLS: Final = ROOT / ".cache/chart"
VALUE_SETS: Final = ("sim", "vllm-cpu", "gpu")  # names of the files values-<name>.yaml
KUBERNETES: Final = "1.35"
_REMEDY: Final = "run requirements/chart.sh .venv/bin/python .cache/chart"
Manifest = dict[str, Any]  # parsed YAML, whose types the schemas of Kubernetes define


class Refused(Exception):
    """Helm refused to render the chart. The message is Helm's."""


def helm() -> Path:
    """The path of Helm. Skips the test if Helm is not installed."""
    own = TOOLS / "bin/helm"
    found = os.environ.get("HELM") or (str(own) if own.exists() else shutil.which("helm"))
    if not found:
        pytest.skip(f"Helm is not installed: {_REMEDY}")
    return Path(found)


def schemas() -> Path:
    """The folder with the schemas of Kubernetes. Skips the test if it is not there."""
    folder = TOOLS / "python"
    if not (folder / "kubernetes_validate").is_dir():
        pytest.skip(f"the schemas of Kubernetes are not installed: {_REMEDY}")
    return folder


def render(
    value_set: str = "",
    values: Mapping[str, Any] | None = None,
    *,
    release: str = "pdmesh",
    kubernetes: str = KUBERNETES,
) -> list[Manifest]:
    """Render the chart with an example file's values, which `values` override. Raises Refused."""
    text = rendered(value_set, json.dumps(values or {}), release, kubernetes)
    return [each for each in yaml.load_all(text, yaml.CSafeLoader) if each]


@cache
def rendered(value_set: str, values: str, release: str, kubernetes: str) -> str:
    command = [str(helm()), "template", release, str(CHART), "--kube-version", f"{kubernetes}.0"]
    if value_set:
        command += ["--values", str(CHART / f"values-{value_set}.yaml")]
    command += ["--values", "-"]
    done = subprocess.run(command, input=values, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Refused(done.stderr)
    return done.stdout


def of_kind(manifests: list[Manifest], *kinds: str) -> list[Manifest]:
    return [each for each in manifests if each["kind"] in kinds]


def pods(manifests: list[Manifest]) -> dict[str, Manifest]:
    """The pod templates by workload name."""
    found = of_kind(manifests, "Deployment", "StatefulSet", "DaemonSet", "Job")
    return {each["metadata"]["name"]: each["spec"]["template"] for each in found}


def component(pod: Manifest) -> str:
    return str(pod["metadata"]["labels"]["app.kubernetes.io/component"])


def services(manifests: list[Manifest]) -> dict[str, Manifest]:
    """The pod templates of the mesh's own services, without NATS, Valkey and Jobs."""
    others = {"nats", "redis", "desired-state"}
    return {name: pod for name, pod in pods(manifests).items() if component(pod) not in others}
