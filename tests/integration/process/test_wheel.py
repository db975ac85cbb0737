"""Tests which files `pip install pdmesh` puts on a machine."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_wheel_installs_one_package_with_the_services_in_it(tmp_path: Path) -> None:
    source, site = tmp_path / "source", tmp_path / "site"
    leave = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for folder in ("libs", "services"):
        shutil.copytree(ROOT / folder, source / folder, symlinks=True, ignore=leave)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "--quiet", "--no-input", "wheel", "--no-index", "--no-deps"]
    wheel = [*pip, "--no-build-isolation", "--wheel-dir", str(tmp_path), str(source)]
    subprocess.run(wheel, check=True, timeout=200)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as archive:
        archive.extractall(site)
    assert {path.name for path in site.iterdir() if path.suffix != ".dist-info"} == {"pdmesh"}
    assert (site / "pdmesh/services/master_scheduler/admin/page/page.html").is_file()
    # The option -P keeps the repository off the import path. Otherwise a wrong import would find
    # the repository's `services`.
    names = "gateway master_scheduler prefill decode instance kv_cache_index health_monitor"
    code = "; ".join(f"import pdmesh.services.{name}.__main__ as m" for name in names.split())
    command = [sys.executable, "-P", "-c", f"{code}; print(m.__file__)"]
    found = subprocess.run(
        command, cwd=tmp_path, env={"PYTHONPATH": str(site)}, capture_output=True, text=True,
        timeout=200, check=False,
    )  # fmt: skip
    assert found.stdout.startswith(str(site)), found.stderr
