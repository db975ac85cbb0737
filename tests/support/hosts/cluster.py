"""Starts a mesh over several hosts with the commands of docs/deploy.md and a layout file.

Each host is a network namespace of this machine.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pdmesh.embedded import child
from pdmesh.launcher import state
from pdmesh.launcher.hosts.folder import HostFolder
from pdmesh.launcher.hosts.layout import Layout, read
from pdmesh.net.addresses import join
from pdmesh.net.nats.bus import NatsBus
from pdmesh.net.tls.certificate_renewal import CertificateFolder
from pdmesh.net.tls.own_certificate import using_certificates
from tests.support.hosts.network import Cable, Network, free_subnet
from tests.support.waiting import until

ROOT = Path(__file__).parents[3]
_EXAMPLE_SUBNET = "10.0.0."  # the subnet in the files of deploy/hosts
_REDIS = ROOT / ".cache/redis/redis-server"  # installed by .ci/redis

# The namespaces share one machine's memory, so UCX has to be restricted to TCP.
_ENV = {
    "UCX_TLS": "tcp",
    "UCX_NET_DEVICES": "eth0",
    "PDMESH_PREFILL_NUM_SLOTS": "48",
    "PDMESH_DECODE_NUM_SLOTS": "48",
    "PDMESH_VALKEY_SERVER": os.environ.get("PDMESH_VALKEY_SERVER", str(_REDIS)),
}


def why_no_redis() -> str:
    """Why there is no Redis with TLS. Empty if there is one."""
    if Path(_ENV["PDMESH_VALKEY_SERVER"]).exists():
        return ""
    return "needs a Redis with TLS: run .ci/redis, or set PDMESH_VALKEY_SERVER"


@dataclass
class Cluster:
    """The mesh. Each host runs `pdmesh up` in its namespace."""

    directory: Path
    layout: Layout
    network: Network
    env: Mapping[str, str]
    api_key: str
    launchers: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, host: str) -> None:
        words = {
            "folders/a": self.folder(host),
            "10.0.0.11": self.layout.address(host),
            "keys.json": self.directory / "keys.json",
        }
        more = f" --engine sim --state-dir {self.state_dir(host)}"
        command = documented("pdmesh up --host-folder", words, more)
        env = {**os.environ, **self.env}
        log_file = self.directory / f"{host}.log"
        self.launchers[host] = child.start(
            self.network.inside(host, *command), env, log_file, cwd=ROOT
        )

    def folder(self, host: str) -> Path:
        return self.directory / "hosts" / host

    def state_dir(self, host: str) -> Path:
        return self.directory / f"state-{host}"

    def log(self, host: str) -> str:
        return (self.directory / f"{host}.log").read_text()

    @property
    def hosts(self) -> list[str]:
        return list(self.layout.hosts)

    @property
    def server_hosts(self) -> tuple[str, ...]:
        return self.layout.server_hosts

    def url(self, host: str) -> str:
        return f"http://{join(self.layout.address(host), 8000)}"

    def mesh_state(self, host: str) -> state.MeshState | None:
        return state.read(self.state_dir(host))

    def is_ready(self, host: str) -> bool:
        launcher = self.launchers[host]
        assert launcher.poll() is None, self.log(host)
        found = self.mesh_state(host)
        return found is not None and found.phase == "ready"

    async def until_ready(self, within_s: float = 240.0) -> float:
        return await until(lambda: all(map(self.is_ready, self.hosts)), within_s)

    def host_of(self, process: str) -> str:
        return process.partition("-")[0]

    def pid(self, host: str, process: str) -> int:
        """The process ID on that host; 0 if the process does not run."""
        found = self.mesh_state(host)
        return 0 if found is None else found.processes[process].pid

    def reap(self, host: str) -> None:
        self.launchers.pop(host).wait(30)

    @contextlib.contextmanager
    def as_admin(self) -> Iterator[None]:
        """Connect to NATS with the operator's certificate, as `pdmesh` commands do."""
        folder = CertificateFolder(self.directory / "hosts/admin/operator")
        with using_certificates(folder, nats_roles=True):
            yield

    @contextlib.asynccontextmanager
    async def bus(self) -> AsyncIterator[NatsBus]:
        with self.as_admin():
            bus = await NatsBus.connect(self.host_folder.nats_url, "test")
            try:
                yield bus
            finally:
                await bus.close()

    @property
    def host_folder(self) -> HostFolder:
        return HostFolder.read(self.folder(self.hosts[0]))


@contextlib.asynccontextmanager
async def cluster(
    file: Path, directory: Path, cable: Cable, env: Mapping[str, str] | None = None
) -> AsyncIterator[Cluster]:
    """A cluster with all hosts of the layout file, ready to serve."""
    subnet = free_subnet()
    here = directory / file.name
    here.write_text(file.read_text().replace(_EXAMPLE_SUBNET, subnet))
    words = {
        "deploy/hosts/hosts.yaml": here,
        "folders": directory / "hosts",
        "keys.json": directory / "keys.json",
    }
    _run(documented("pdmesh hosts prepare", words))
    api_key = _run(documented("pdmesh keys add", words)).split()[-1]
    layout = read(here.read_text())
    addresses = {name: layout.address(name) for name in layout.hosts}
    with Network(addresses, f"{subnet}1", cable) as network:
        env = {**_ENV, "PYTHONPATH": _python_path(), **(env or {})}
        running = Cluster(directory, layout, network, env, api_key)
        try:
            for host in running.hosts:
                running.start(host)
            await running.until_ready()
            yield running
        finally:
            for host, launcher in running.launchers.items():
                network.kill_all(host)
                launcher.wait(30)


def documented(start: str, words: Mapping[str, object], more: str = "") -> list[str]:
    """The command in docs/deploy.md that begins with `start`, with its example words replaced."""
    lines = (ROOT / "docs/deploy.md").read_text().splitlines()
    (line,) = (each for each in lines if each.startswith(start))
    _, *arguments = shlex.split(line + more)
    replaced = [str(words.get(each, each)) for each in arguments]
    return [sys.executable, "-m", "pdmesh.cli.app", *replaced]


def _run(command: list[str]) -> str:
    env = {**os.environ, "PYTHONPATH": _python_path()}
    done = subprocess.run(command, check=True, cwd=ROOT, env=env, capture_output=True, text=True)
    return done.stdout


def _python_path() -> str:
    return os.pathsep.join(path for path in sys.path if path)
