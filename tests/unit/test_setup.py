"""Setting up fails in one line that names the remedy (requirements/install.sh, Makefile)."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]


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
        ("OSError: [Errno 28] No space left on device", "the disk is full; base needs about 1500 MB"),
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


def test_too_little_room_is_told_before_anything_is_fetched(tmp_path: Path) -> None:
    script(tmp_path / "venv/bin/python", f"touch {tmp_path}/fetched")
    df = script(tmp_path / "bin/df", 'echo header; echo "disk 9 9 100 99% /"').parent
    path = f"{df}:{os.environ['PATH']}"
    done = run(_ROOT / "requirements/install.sh", tmp_path / "venv", "vllm", PATH=path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "setup: the disk has 100 MB left; vllm needs about 5000 MB\n"
    assert not (tmp_path / "fetched").exists()


def test_another_python_is_refused_with_what_to_install(tmp_path: Path) -> None:
    shutil.copy(_ROOT / "Makefile", tmp_path)
    python = script(tmp_path / "python3.9", '[ "$1" = --version ] && echo "Python 3.9.2" || exit 1')
    done = run("make", "-C", tmp_path, f"PYTHON={python}", ".venv/.done/venv")
    assert done.returncode != 0
    assert 'needs Python 3.11, and "' in done.stderr
    assert "is: Python 3.9.2 - install it (apt install python3.11 python3.11-venv)" in done.stderr
