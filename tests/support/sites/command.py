"""Runs the `pdmesh` command in processes, with one state directory and free ports."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdmesh.launcher import state
from tests.support.waiting import wait_until

START_S = 90.0


class Pdmesh:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        kept = {k: v for k, v in os.environ.items() if not k.startswith("PDMESH_")}
        self.environment = {**kept, "PYTHONPATH": os.pathsep.join(sys.path)}
        self.output = directory / "up.txt"
        self.launchers: list[subprocess.Popen[bytes]] = []
        self.others: list[subprocess.Popen[str]] = []

    def _command(self, *arguments: str) -> list[str]:
        own = ["--state-dir", str(self.directory / "state")]
        return [sys.executable, "-m", "pdmesh.cli.app", arguments[0], *own, *arguments[1:]]

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self._command(*arguments),
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=START_S,
            check=False,
        )

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start a command that runs until Ctrl-C. Its stdout is a pipe."""
        process = subprocess.Popen(
            self._command(*arguments), env=self.environment, stdout=subprocess.PIPE, text=True
        )
        self.others.append(process)
        return process

    def chat(self) -> str:
        """Run `pdmesh chat`, and return the answer. Fails with the error message that a user would
        get.
        """
        answer = self.run("chat", "hello", "--max-tokens", "8")
        assert (answer.returncode, answer.stderr) == (0, "")
        return answer.stdout

    def up(self, *arguments: str, stdout: int | None = None) -> subprocess.Popen[bytes]:
        command = self._command(
            "up", "--engine", "sim", "--http-port", "0", "--grpc-port", "0",
            "--prefill", "1", "--decode", "1", *arguments,
        )  # fmt: skip
        with self.output.open("wb") as output:
            launcher = subprocess.Popen(
                command,
                env=self.environment,
                stdout=output if stdout is None else stdout,
                stderr=output,
                start_new_session=True,
            )
        self.launchers.append(launcher)
        return launcher

    def mesh(self) -> state.MeshState:
        mesh = state.read(self.directory / "state")
        assert mesh is not None, self.output.read_text()
        return mesh

    def until_ready(self, launcher: subprocess.Popen[bytes]) -> state.MeshState:
        def is_ready() -> bool:
            assert launcher.poll() is None, self.output.read_text()
            mesh = state.read(self.directory / "state")
            return mesh is not None and mesh.phase == "ready"

        wait_until(is_ready, START_S)
        return self.mesh()


@pytest.fixture
def pdmesh(tmp_path: Path) -> Iterator[Pdmesh]:
    command = Pdmesh(tmp_path)
    yield command
    if (pid := state.locker_pid(tmp_path / "state")) is not None:
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: state.locker_pid(tmp_path / "state") is None)
    for launcher in command.launchers:
        launcher.kill()
        launcher.wait()
    for other in command.others:
        other.kill()
        other.communicate()
