"""The environment of a peer system is made once. If it cannot be made, one line says why."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from loadtests.peers.install import Packages, Unavailable, compiled, python_of

PINNED = Packages(("peer==1.0",), ("needed",))


class Pip:
    """Records the commands instead of running them. Pip fails if `fails` is an argument."""

    def __init__(self, fails: str = "") -> None:
        self.fails, self.commands = fails, list[Sequence[str]]()

    def __call__(self, command: Sequence[str], **_: Any) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        if "venv" in command:
            Path(command[-1]).mkdir(parents=True)
        is_bad = bool(self.fails) and self.fails in command
        said = "WARNING: retrying\nERROR: no matching distribution"
        return subprocess.CompletedProcess(command, int(is_bad), "", said if is_bad else "")


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> Pip:
    fake = Pip()
    monkeypatch.setattr(subprocess, "run", fake)
    return fake


def test_an_environment_is_made_once(pip: Pip, tmp_path: Path) -> None:
    python = python_of("peer", PINNED, tmp_path)
    assert python == tmp_path / "peer/bin/python"
    assert [command[-1] for command in pip.commands[1:]] == ["peer==1.0", "needed"]
    assert "--no-deps" in pip.commands[1]
    num_commands = len(pip.commands)
    assert python_of("peer", PINNED, tmp_path) == python
    assert len(pip.commands) == num_commands


def test_other_versions_are_another_environment(pip: Pip, tmp_path: Path) -> None:
    python_of("peer", PINNED, tmp_path)
    python_of("peer", Packages(("peer==2.0",)), tmp_path)
    assert pip.commands[-1][-1] == "peer==2.0"


def test_what_failed_is_said_in_one_line_and_tried_again(pip: Pip, tmp_path: Path) -> None:
    pip.fails = "peer==1.0"
    with pytest.raises(Unavailable, match=r"^peer: WARNING: retrying ERROR: no matching") as told:
        python_of("peer", PINNED, tmp_path)
    assert "\n" not in str(told.value)
    pip.fails = ""
    python_of("peer", PINNED, tmp_path)


def test_without_a_compiler_the_program_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(Unavailable, match="generator: there is no C compiler"):
        compiled("generator", tmp_path)
