"""The dev cluster of docker-compose.yml under a project name and host ports of its own, driven by
the docker CLI.
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
    """An engine for as long as the block runs: the one that answers, or what `script` starts, which
    is stopped again.

    Yields False where none can be had. `script up` and `script stop` must do what their names say.
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
    """A running dev cluster; leaving the block removes its containers, networks and volumes."""

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
        """The services whose containers stay up."""
        return sorted(c["Service"] for c in self.containers())

    def containers(self) -> list[dict[str, Any]]:
        """What `docker compose ps` shows, one dict per container that runs."""
        lines = self.compose("ps", "--format", "json").splitlines()
        return [json.loads(line) for line in lines]

    def inspect(self, service: str) -> dict[str, Any]:
        """What `docker inspect` shows of a service's container."""
        container = self.compose("ps", "--all", "--quiet", service).strip()
        done = subprocess.run(["docker", "inspect", container], check=True, capture_output=True)
        found: list[dict[str, Any]] = json.loads(done.stdout)
        return found[0]

    def execute(self, service: str, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command in a service's container. It is not an error here if the command fails."""
        return self._run("exec", "-T", service, *command)

    def kill_process(self, service: str) -> None:
        """SIGKILL everything in the container but its init, as the kernel's OOM killer would."""
        self.execute(service, "sh", "-c", "kill -KILL -1")

    def wait_restarted(self, service: str, num_restarts: int, timeout_s: float) -> None:
        """Until the engine has restarted the container and calls it healthy."""
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
        """Run `docker compose`; what it prints on stdout."""
        done = self._run(*arguments)
        assert done.returncode == 0, f"docker compose {' '.join(arguments)}\n{done.stderr[-4000:]}"
        return done.stdout

    def _run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = ["docker", "compose", "--project-name", self._project, *arguments]
        return subprocess.run(
            command, cwd=ROOT, env=self._env, capture_output=True, text=True, check=False
        )


def _free_ports(count: int) -> list[int]:
    """Ports that nobody has now; all are held at once so that they differ."""
    with_ports = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in with_ports]
    for server in with_ports:
        server.close()
    return ports
