"""Runs the development cluster of docker-compose.yml with the docker CLI.

Each run has its own project name and host ports.
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
_START_TIMEOUT_S: Final = 600
_POLL_S: Final = 0.25
_FILES: Final = "docker-compose.yml:tests/compose/patient.yml"
_METRICS: Final = (
    "import urllib.request as r; print(r.urlopen('http://127.0.0.1:9100/metrics').read().decode())"
)


def engine_answers() -> bool:
    if shutil.which("docker") is None:
        return False
    return subprocess.run(["docker", "info"], capture_output=True, check=False).returncode == 0


def has_compose() -> bool:
    command = ["docker", "compose", "version"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@contextmanager
def engine(script: Path | None) -> Iterator[bool]:
    """Provide a container engine for the block. Yields False if there is none.

    The engine already runs, or `script` starts and stops it. The script must take the arguments
    `up` and `stop`.
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

    def __init__(self, *services: str, timeout_s: int = _START_TIMEOUT_S, **settings: str) -> None:
        """Choose the services that start. Without names, all services of the chosen profiles start.

        `settings` are variables of docker-compose.yml. `timeout_s` is the longest wait until the
        services are healthy.
        """
        self.http_port, self.grpc_port = _free_ports(2)
        self._project = f"pdmesh-test-{secrets.token_hex(3)}"
        self._to_start, self._timeout_s = services, timeout_s
        self._env = os.environ | {"ENGINE": "sim", "COMPOSE_FILE": _FILES} | _wheels() | settings
        self._env["PDMESH_HTTP_PORT"] = str(self.http_port)
        self._env["PDMESH_GRPC_PORT"] = str(self.grpc_port)

    def __enter__(self) -> Self:
        try:
            self.compose("build", "gateway")  # all services of the mesh have the same image
            self.up(*self._to_start)
        except BaseException:
            print(self.logs())
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.compose("down", "--volumes", "--remove-orphans")

    @property
    def services(self) -> list[str]:
        """The services whose containers run."""
        return sorted(c["Service"] for c in self.containers())

    def containers(self) -> list[dict[str, Any]]:
        """The output of `docker compose ps`, with one dict for each running container."""
        lines = self.compose("ps", "--format", "json").splitlines()
        return [json.loads(line) for line in lines]

    def inspect(self, service: str) -> dict[str, Any]:
        """The output of `docker inspect` for a service's container."""
        container = self.compose("ps", "--all", "--quiet", service).strip()
        done = subprocess.run(["docker", "inspect", container], check=True, capture_output=True)
        found: list[dict[str, Any]] = json.loads(done.stdout)
        return found[0]

    def up(self, *services: str) -> None:
        """Start these services, by default all, and wait until they are healthy."""
        wait = ["--wait", "--wait-timeout", str(self._timeout_s)]
        self.compose("up", "--no-build", "--detach", *wait, *services)

    def execute(self, service: str, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command in a service's container. Does not raise if the command fails."""
        return self._run("exec", "-T", service, *command)

    def pdmesh(self, *words: str, stdin: str = "") -> str:
        """Run a command of `pdmesh` in a running master's container, and return its stdout."""
        master = next(name for name in self.services if name.startswith("master-"))
        done = self._run("exec", "-T", master, "pdmesh", *words, stdin=stdin)
        assert done.returncode == 0, f"pdmesh {' '.join(words)} in {master}\n{done.stderr[-4000:]}"
        return done.stdout

    def metric(self, service: str, name: str) -> float:
        """The sum of a metric over its labels, from the container's page. 0 if it has none."""
        lines = self.execute(service, "python", "-c", _METRICS).stdout.splitlines()
        return sum(float(x.split()[-1]) for x in lines if x.startswith((f"{name}{{", f"{name} ")))

    def kill(self, service: str) -> None:
        """Send SIGKILL to the container.

        The engine does not restart it, because a command killed it.
        """
        self.compose("kill", service)

    def start(self, service: str) -> None:
        self.compose("start", service)

    def kill_process(self, service: str) -> None:
        """Send SIGKILL to all processes in the container except init, as the OOM killer would."""
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

    def _run(self, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        command = ["docker", "compose", "--project-name", self._project, *arguments]
        return subprocess.run(
            command, cwd=ROOT, env=self._env, input=stdin, capture_output=True, text=True,
            check=False,
        )  # fmt: skip


def _wheels() -> dict[str, str]:
    """The setting for wheels in the image's build.

    It is the folder that pip on this machine uses.
    """
    folder = os.environ.get("PIP_FIND_LINKS", "")
    return {"PDMESH_WHEELS": folder} if Path(folder).is_absolute() else {}


def _free_ports(count: int) -> list[int]:
    """Free ports. They are bound at the same time, so that they are different."""
    with_ports = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in with_ports]
    for server in with_ports:
        server.close()
    return ports
