"""The private directory for the sockets of an engine."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

from pdmesh.engine.vllm.child.private_dir import make_private_dir


def test_the_directory_is_private_and_stays_while_its_process_lives(tmp_path: Path) -> None:
    first = make_private_dir(tmp_path)
    second = make_private_dir(tmp_path)
    assert first.exists()
    assert first != second
    assert stat.S_IMODE(first.stat().st_mode) == 0o700
    assert f"-{os.getpid()}-" in first.name


def test_files_that_a_killed_process_left_are_removed(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    left = tmp_path / f"pdmesh-vllm-{ended.pid}-abc"
    left.mkdir()
    other = tmp_path / "somebody-elses"
    other.mkdir()
    make_private_dir(tmp_path)
    assert not left.exists()
    assert other.exists()
