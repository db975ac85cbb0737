"""Runs the dev cluster of docker-compose.yml with the docker CLI, under its own project name and
host ports.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Self

ROOT: Final = Path(__file__).parents[2]
_START_TIMEOUT_S: Final = 180
_POLL_S: Final = 0.25


def engine_answers() -> bool:
    if shutil.which("docker") is None:
        return False
    return subprocess.run(["docker", "info"], capture_output=True, check=False).returncode == 0


def has_compose() -> bool:
    command = ["docker", "compose", "version"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@contextmanager
def engine(script: Path | None) -> Iterator[bool]:
    """A container engine for the block: a running one, or one that `script` starts and stops.

    Yields False if there is none. The script must take the arguments `up` and `stop`.
    """
    if engine_answers() and has_compose():
        yield True
    elif script is None or not script.exists():
        yield False
    else:
        subprocess.run(["bash", script, "up"], check=True, stdout=subprocess.DEVNULL)
        try:
            yield True
        finally:
            subprocess.run(["bash", script, "stop"], check=True, stdout=subprocess.DEVNULL)


class Cluster:
    """A running dev cluster. The end of the block removes its containers, networks and volumes."""

    def __init__(self, engine_kind: str = "sim") -> None:
        self.http_port, self.grpc_port = _free_ports(2)
        self._project = f"pdmesh-test-{secrets.token_hex(3)}"
        self._env = os.environ | {
            "ENGINE": engine_kind,
            "PDMESH_HTTP_PORT": str(self.http_port),
            "PDMESH_GRPC_PORT": str(self.grpc_port),
        }

    def __enter__(self) -> Self:
        up = ["up", "--build", "--detach", "--wait", "--wait-timeout", str(_START_TIMEOUT_S)]
        try:
            self.compose(*up)
        except BaseException:
            print(self.logs())
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.compose("down", "--volumes", "--remove-orphans")

    @property
    def services(self) -> list[str]:
        """The services whose containers keep running."""
        return sorted(c["Service"] for c in self.containers())

    def containers(self) -> list[dict[str, Any]]:
        """The output of `docker compose ps`: one dict for each running container."""
        lines = self.compose("ps", "--format", "json").splitlines()
        return [json.loads(line) for line in lines]

    def inspect(self, service: str) -> dict[str, Any]:
        """The output of `docker inspect` for a service's container."""
        container = self.compose("ps", "--all", "--quiet", service).strip()
        done = subprocess.run(["docker", "inspect", container], check=True, capture_output=True)
        found: list[dict[str, Any]] = json.loads(done.stdout)
        return found[0]

    def execute(self, service: str, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command in a service's container. Does not raise if the command fails."""
        return self._run("exec", "-T", service, *command)

    def kill_process(self, service: str) -> None:
        """SIGKILL all processes in the container except its init, as the OOM killer would."""
        self.execute(service, "sh", "-c", "kill -KILL -1")

    def wait_restarted(self, service: str, num_restarts: int, timeout_s: float) -> None:
        """Wait until the engine has restarted the container and reports it healthy."""
        deadline = time.monotonic() + timeout_s
        while True:
            found = self.inspect(service)
            restarts, health = found["RestartCount"], found["State"]["Health"]["Status"]
            if restarts >= num_restarts and health == "healthy":
                return
            assert time.monotonic() < deadline, (
                f"{service} is {health} after {restarts} restarts\n{self.logs(service)}"
            )
            time.sleep(_POLL_S)

    def logs(self, *services: str) -> str:
        return self._run("logs", "--no-color", "--tail", "50", *services).stdout

    def compose(self, *arguments: str) -> str:
        """Run `docker compose`, and return its stdout."""
        done = self._run(*arguments)
        assert done.returncode == 0, f"docker compose {' '.join(arguments)}\n{done.stderr[-4000:]}"
        return done.stdout

    def _run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = ["docker", "compose", "--project-name", self._project, *arguments]
        return subprocess.run(
            command, cwd=ROOT, env=self._env, capture_output=True, text=True, check=False
        )


def _free_ports(count: int) -> list[int]:
    """Free ports. All are bound at the same time, so that they differ."""
    with_ports = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in with_ports]
    for server in with_ports:
        server.close()
    return ports
