"""A whole mesh on this machine as an async context manager, for `pdmesh up` and for tests.

    async with Mesh(MeshSpec(engine="sim", http_port=0, grpc_port=0), state_dir) as mesh:
        print(mesh.http_url)

At the end of the block, all processes are stopped, gateways first and servers last. Use a mesh only
on the main thread's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from pdmesh.config import BadSetting, is_set
from pdmesh.core.control.restart_policy import (
    DEATHS_WHILE_STARTING,
    GiveUp,
    ProcessPhase,
    RestartPolicy,
    RestartScheduled,
)
from pdmesh.embedded.binaries import ServerNotFound
from pdmesh.embedded.members import NatsMember
from pdmesh.embedded.servers import NatsServer, Server, ValkeyServer
from pdmesh.engine.sim_tokenizer import write_sim_model
from pdmesh.errors import BadCertificates, MeshError
from pdmesh.launcher import first_groups, log_files, state
from pdmesh.launcher.certificates import CertificateAccounts, MeshCertificates, nats_folder
from pdmesh.launcher.external import nats_problem, redis_problem
from pdmesh.launcher.gateway_ports import reserve_ports
from pdmesh.launcher.hosts.folder import SERVICES_WITH_REDIS, HostFolder
from pdmesh.launcher.hosts.servers import servers_of
from pdmesh.launcher.process_health import ProcessHealth
from pdmesh.launcher.spec import (
    MeshSpec,
    Ports,
    ProcessSpec,
    StopOrder,
    Wiring,
    asked_of,
    services,
    unpaired,
)
from pdmesh.launcher.supervisor import Notice, Supervisor
from pdmesh.net.addresses import join
from pdmesh.net.tls.own_certificate import using_certificates
from pdmesh.server_permissions.role_permissions import REDIS_ROLES

if TYPE_CHECKING:
    from pdmesh.net.tls.certificate_renewal import CertificateFolder

Report = Callable[[str], None]  # prints one line of progress
_PROBE_EVERY_S: Final = 0.1
_HOUSEKEEPING_S: Final = 1.0
_MAX_PROBLEMS: Final = 64  # at most this many different problems are reported


class MeshFailed(Exception):
    """The mesh could not start. The message is one line with the cause and the remedy."""


class Mesh:
    """The processes of a mesh, and their addresses.

    Names of processes are, for example, prefill-0, gateway-0, master-scheduler, master-scheduler-1,
    kv-cache-index, nats, valkey. In a mesh with regions, the names of instances, gateways and
    masters begin with the region: eu-prefill-0, eu-master-scheduler.
    """

    def __init__(
        self,
        spec: MeshSpec,
        state_dir: Path,
        *,
        report: Report = lambda _: None,
        policy: RestartPolicy | None = None,
    ) -> None:
        self.spec, self.state_dir = spec, state_dir.absolute()
        self._given_report, self._policy = report, policy
        self._cleanup = contextlib.AsyncExitStack()
        self._servers: dict[str, Server] = {}
        self._wiring: Wiring | None = None
        self._supervisor: Supervisor | None = None
        self._health: ProcessHealth | None = None
        self._certificates: MeshCertificates | None = None  # None: no TLS
        self._accounts: CertificateAccounts | None = None  # None: NATS does not distinguish users
        self._host: HostFolder | None = None  # None: the mesh is on this machine alone
        self._read_by_nats: list[float] = []  # modification times of the files that NATS has read
        self._phase, self._message = "starting", ""
        self._ready: set[str] = set()
        self._last_state: state.MeshState | None = None
        self._told_problems: set[str] = set()
        self._started_at = time.monotonic()

    async def __aenter__(self) -> Self:
        """Start all processes and wait until they are ready.

        Raises `MeshFailed`, `MeshRunning`, `PortTaken`, `BadHostFolder`.
        """
        try:
            await self._start()
        except BaseException as exc:
            self._phase, self._message = "failed", str(exc)
            await self.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    # State for tests and users.

    @property
    def http_url(self) -> str:
        """The URL of the gateways, or of the first region's gateways in a mesh with regions."""
        return self.http_url_in(self._first_region)

    @property
    def grpc_address(self) -> str:
        return join(self.spec.host, self.wiring.ports[self._first_region].grpc)

    def http_url_in(self, region: str) -> str:
        return f"http://{join(self.spec.host, self.wiring.ports[region].http)}"

    @property
    def _first_region(self) -> str:
        return self.spec.regions[0] if self.spec.regions else ""

    @property
    def nats_url(self) -> str:
        return self.wiring.nats_url

    @property
    def redis_url(self) -> str:
        return self.wiring.redis_url

    @property
    def token(self) -> str:
        """The mesh token, which all processes share."""
        return self.wiring.mesh_token

    @property
    def certificates(self) -> CertificateFolder | None:
        """The certificate of commands on this machine. None means that the mesh has no TLS."""
        if self._host is not None:
            from pdmesh.net.tls.certificate_renewal import CertificateFolder

            return CertificateFolder(self._host.of_commands)
        return self._certificates.of_commands if self._certificates is not None else None

    def as_commands(self) -> AbstractContextManager[None]:
        """In this context, connections use the certificate of commands on this machine."""
        return using_certificates(self.certificates, nats_roles=self.wiring.nats_roles)

    @property
    def wiring(self) -> Wiring:
        assert self._wiring is not None, "the mesh has not started"
        return self._wiring

    @property
    def supervisor(self) -> Supervisor:
        assert self._supervisor is not None, "the mesh has not started"
        return self._supervisor

    @property
    def health(self) -> ProcessHealth:
        assert self._health is not None, "the mesh has not started"
        return self._health

    @property
    def names(self) -> list[str]:
        """The names of all processes, in start order."""
        return list(self.supervisor.specs)

    def pid(self, name: str) -> int:
        """The process id. Raises KeyError if the process does not run."""
        pid = self.supervisor.pid(name)
        if pid is None:
            raise KeyError(name)
        return pid

    def ops_address(self, name: str) -> str:
        """See `ProcessHealth.ops_address`."""
        return self.health.ops_address(name)

    def log_file(self, name: str) -> Path:
        return self.supervisor.log_file(name)

    # Actions for tests and users.

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to one process, like a fault. The supervisor restarts it if it dies."""
        self.supervisor.signal(name, number)

    def lose_region(self, region: str) -> list[str]:
        """Send SIGKILL to all processes of the region at once, and return their names.

        The processes are not restarted before `return_region`.
        """
        names = [name for name, spec in self.supervisor.specs.items() if spec.region == region]
        self.supervisor.lose(names)
        return names

    def return_region(self, region: str) -> None:
        for spec in list(self.supervisor.specs.values()):
            if spec.region == region:
                self.supervisor.start(spec)

    async def restart(self, name: str, timeout_s: float = 60.0) -> None:
        """Stop a process gracefully, start it again, and wait until it is ready."""
        spec = self.supervisor.specs[name]
        await self.supervisor.stop(name)
        self.supervisor.start(spec)
        await self.wait_ready([name], timeout_s)

    async def wait_ready(
        self, names: Iterable[str] | None = None, timeout_s: float | None = None
    ) -> None:
        """Wait until these processes (default: all) report that they are ready.

        Raises `MeshFailed`.
        """
        waiting = list(names if names is not None else self.names)
        missing: dict[str, str] = {}
        deadline = time.monotonic() + (timeout_s or self.spec.start_timeout_s)
        while waiting:
            self._raise_if_hopeless(waiting)
            for name in list(waiting):
                missing[name] = await self.health.missing(name)
                if not missing[name]:
                    waiting.remove(name)
                    self._on_ready(name)
            if waiting and time.monotonic() > deadline:
                raise MeshFailed(self._not_ready_line(waiting, missing))
            if waiting:
                await asyncio.sleep(_PROBE_EVERY_S)

    async def stop(self) -> None:
        """Stop all processes, gateways first and servers last. Idempotent."""
        if self._phase != "failed":
            self._phase = "stopping"
        await self._cleanup.aclose()

    def kill_all(self) -> None:
        """Kill all processes, after a second Ctrl-C."""
        if self._supervisor is not None:
            self._supervisor.kill_all()

    # The start.

    async def _start(self) -> None:
        self._cleanup.enter_context(state.lock(self.state_dir))
        state.forget_run(self.state_dir)
        self._wiring = self._wire()
        self._supervisor = Supervisor(self.state_dir / "logs", self._on_notice, self._policy)
        self._health = ProcessHealth(self._supervisor, self._servers, self._report)
        self._cleanup.push_async_callback(self._stop_processes)
        self._write_state()
        processes = services(self.spec, self.wiring)
        if problem := unpaired(processes):
            raise MeshFailed(problem)
        self._issue_certificates(processes)
        with self.as_commands():
            await self._check_external()
        await self._start_servers()
        for process in processes:
            self.supervisor.start(process)
        await self._apply_groups()
        await self.wait_ready(self._awaited())
        self._phase = "ready"
        self._write_state()
        housekeeping = asyncio.create_task(self._keep_house(), name="mesh-housekeeping")
        self._cleanup.push_async_callback(_cancelled, housekeeping)

    async def _apply_groups(self) -> None:
        file = self.spec.groups_file
        if file is None:
            return
        await self.wait_ready(
            n for n, s in self.supervisor.specs.items() if s.tier is StopOrder.CONTROL
        )
        try:
            environment = {**os.environ, **self.spec.env}
            with self.as_commands():
                await first_groups.apply(file, self.nats_url, environment, self.wiring.mesh_token)
        except MeshError as exc:
            raise MeshFailed(f"{file}: {exc.message}") from exc

    def _awaited(self) -> list[str]:
        """The processes that must be ready before the mesh is.

        Gateways are ready only once an instance serves. If no instance has a role, the mesh does
        not wait for its gateways.
        """
        spec = self.spec
        serves = spec.groups_file or any(
            (spec.num_prefill, spec.num_decode, spec.num_fusion, spec.num_pooling)
        )
        specs = self.supervisor.specs
        return [name for name, s in specs.items() if serves or s.tier is not StopOrder.GATEWAY]

    def _wire(self) -> Wiring:
        spec = self.spec
        ports = reserve_ports(spec, self._cleanup)
        if spec.host_folder is not None:
            return self._wire_host(HostFolder.read(spec.host_folder), ports)
        tls = self.state_dir / "tls" if spec.tls else None
        if spec.nats_url is None:
            self._add_server(self._nats(tls))
        redis_urls: dict[str, str] = {}
        if spec.redis_url is None:
            valkey = ValkeyServer(self.state_dir / "valkey", () if tls is None else REDIS_ROLES)
            redis_urls = valkey.urls
            self._add_server(valkey)
        return Wiring(
            nats_url=spec.nats_url or self._servers["nats"].url,
            redis_url=spec.redis_url or self._servers["valkey"].url,
            ports=ports,
            hash_secret=state.hash_secret(self.state_dir, {**os.environ, **self.spec.env}),
            mesh_token=self._mesh_token(),
            state_dir=self.state_dir,
            model_dir=self._model_dir(),
            tls_dir=tls,
            nats_roles=self._accounts is not None or self._has_outer_roles(),
            redis_urls=redis_urls,
        )

    def _wire_host(self, folder: HostFolder, ports: Mapping[str, Ports]) -> Wiring:
        """Raises BadHostFolder, PortTaken."""
        self._host = folder
        for server in servers_of(folder, self.state_dir):
            self._add_server(server)
        self._read_by_nats = self._files_of_nats()
        return Wiring(
            nats_url=folder.nats_url,
            redis_url="",
            ports=ports,
            hash_secret=folder.secrets.hash_secret,
            mesh_token=folder.secrets.mesh_token,
            state_dir=self.state_dir,
            model_dir=self._model_dir(),
            tls_dir=folder.tls_dir,
            nats_roles=True,
            redis_urls={role: folder.redis_url(role) for role in SERVICES_WITH_REDIS},
        )

    def _files_of_nats(self) -> list[float]:
        """The modification times of the files that NATS reads, if NATS runs on this host."""
        nats = self._servers.get("nats")
        files = nats.watched if isinstance(nats, NatsMember) else []
        return [each.stat().st_mtime for each in files if each.exists()]

    def _nats(self, tls: Path | None) -> NatsServer:
        directory = self.state_dir / "nats"
        if tls is None:
            return NatsServer(directory)
        self._accounts = CertificateAccounts(tls, directory / "accounts.conf")
        return NatsServer(directory, tls_dir=nats_folder(tls), accounts=self._accounts.file)

    def _has_outer_roles(self) -> bool:
        """Whether the user's own NATS distinguishes roles."""
        given = {**os.environ, **self.spec.env}
        return self.spec.tls and is_set(given, "PDMESH_NATS_ROLES")

    def _issue_certificates(self, processes: Iterable[ProcessSpec]) -> None:
        """Raises MeshFailed."""
        if self.wiring.tls_dir is None or self._host is not None:
            return
        try:
            self._certificates = MeshCertificates(
                self.wiring.tls_dir, processes, self.spec.inner_host
            )
        except BadCertificates as exc:
            raise MeshFailed(exc.message) from exc
        if self._accounts is not None:
            self._accounts.write()

    def _mesh_token(self) -> str:
        """The mesh token from the services' settings or the state directory. Raises MeshFailed."""
        given = {**os.environ, **self.spec.env}
        try:
            return state.mesh_token(self.state_dir, given)
        except BadSetting as exc:
            raise MeshFailed(str(exc)) from exc

    def _model_dir(self) -> Path:
        if self.spec.model_dir is not None:
            return self.spec.model_dir.absolute()
        if self.spec.engine != "sim":
            raise MeshFailed(f"{self.spec.engine} needs a model directory: --model DIR")
        directory = self.state_dir / "models" / "sim"
        write_sim_model(directory)
        return directory

    def _add_server(self, server: Server) -> None:
        self._servers[server.name] = server
        self._cleanup.callback(server.close)

    async def _check_external(self) -> None:
        checks = ((self.spec.nats_url, nats_problem), (self.spec.redis_url, redis_problem))
        for url, problem_of in checks:
            if url is not None and (problem := await problem_of(url)):
                raise MeshFailed(problem)

    async def _start_servers(self) -> None:
        for name, server in self._servers.items():
            try:
                command = tuple(server.command())
            except ServerNotFound as exc:
                raise MeshFailed(str(exc)) from exc
            self.supervisor.start(ProcessSpec(name, name, StopOrder.SERVER, command, env={}))
        await self.wait_ready(self._servers)

    async def _stop_processes(self) -> None:
        self._write_state()
        for tier in sorted(StopOrder, reverse=True):
            names = [n for n, s in self.supervisor.specs.items() if s.tier is tier]
            await asyncio.gather(*(self.supervisor.stop(name) for name in names))
        state.forget_run(self.state_dir)

    # Reports and housekeeping.

    def _on_ready(self, name: str) -> None:
        if name not in self._ready and self._phase == "starting":
            self._report(f"{name} is ready ({time.monotonic() - self._started_at:.1f} s)")
        self._ready.add(name)
        self.supervisor.ready(name)
        self._write_state()

    def _on_notice(self, notice: Notice) -> None:
        match notice:
            case RestartScheduled(name, code, deaths, delay_s):
                when = f"in {delay_s:g} s" if delay_s else "now"
                self._report(f"{name} {_ending(code)} ({deaths} in a row); restarting it {when}")
            case GiveUp(name) if self._ends_the_start(name):
                pass  # MeshFailed reports it
            case GiveUp(name, code, deaths):
                self._report(
                    f"{name} {_ending(code)} {deaths} times, given up: "
                    f"{log_files.last_word(self.log_file(name))}"
                )
        if self._phase == "ready":
            asyncio.get_running_loop().call_soon(self._write_state)

    def _ends_the_start(self, name: str) -> bool:
        """Whether the start has failed, or must fail because this process is given up."""
        return self._phase == "failed" or (self._phase == "starting" and name in self._awaited())

    def _raise_if_hopeless(self, names: Iterable[str]) -> None:
        for name in names:
            is_given_up = self.supervisor.phase(name) is ProcessPhase.FAILED
            keeps_dying = self.supervisor.deaths(name) >= DEATHS_WHILE_STARTING
            if is_given_up or (keeps_dying and self._phase == "starting"):
                raise MeshFailed(
                    f"{name} does not start: {log_files.last_word(self.log_file(name))}"
                )

    def _not_ready_line(self, waiting: list[str], missing: dict[str, str]) -> str:
        rest = "; ".join(f"{name} waits for: {missing.get(name, '')}" for name in waiting)
        return f"not ready in time: {rest} (logs: {self.state_dir / 'logs'})"

    async def _keep_house(self) -> None:
        """Bound the logs, renew certificates, and kill processes that run but do not answer.

        If one of these chores fails, the others still run.
        """
        while True:
            for chore in (
                self._bound_logs,
                self._renew_certificates,
                self.health.kill_silent,
                self.health.note_ready,
            ):
                try:
                    await chore()
                except Exception as exc:  # noqa: BLE001  # the mesh runs on, and so must this loop
                    self._report_problem(f"housekeeping failed: {exc!r}")
            self._write_state()
            await asyncio.sleep(_HOUSEKEEPING_S)

    async def _renew_certificates(self) -> None:
        if (found := self._files_of_nats()) != self._read_by_nats:
            self._read_by_nats = found
            with contextlib.suppress(KeyError):
                self.supervisor.signal("nats", signal.SIGHUP)
        if self._certificates is None:
            return
        self._certificates.renew()
        has_new_users = self._accounts is not None and self._accounts.write()
        if self._certificates.has_nats_a_new_one() or has_new_users:
            with contextlib.suppress(KeyError):  # NATS restarts, or is the user's own server
                self.supervisor.signal("nats", signal.SIGHUP)

    async def _bound_logs(self) -> None:
        log_files.bound(self.log_file(name) for name in self.names)

    def _report(self, line: str) -> None:
        """Report a line. Never raises, even if the pipe or the disk for reports is gone.

        A line that cannot be reported is appended to the launcher's log.
        """
        try:
            self._given_report(line)
        except Exception:  # noqa: BLE001
            log_files.append(self.state_dir / "logs" / "launcher.log", line)

    def _report_problem(self, line: str) -> None:
        """Report a problem once, even if it recurs every second."""
        if line not in self._told_problems and len(self._told_problems) < _MAX_PROBLEMS:
            self._told_problems.add(line)
            self._report(line)

    def _write_state(self) -> None:
        processes = {
            name: state.ProcessState(
                pid=self.supervisor.pid(name) or 0,
                service=process.service,
                phase=self.supervisor.phase(name).value,
                ops_address=self.ops_address(name),
            )
            for name, process in self.supervisor.specs.items()
        }
        described = state.MeshState(
            pid=os.getpid(),
            phase=self._phase,
            engine=self.spec.engine,
            model=self.spec.model_name or self.wiring.model_dir.name,
            http_url=self.http_url,
            grpc_address=self.grpc_address,
            nats_url=self.nats_url,
            redis_url=self.redis_url,
            message=self._message,
            processes=processes,
            regions={region: self.http_url_in(region) for region in self.spec.regions},
            asked=asked_of(self.spec),
            tls_dir=str(self.certificates.path) if self.certificates is not None else "",
            nats_roles=self.wiring.nats_roles,
        )
        if described == self._last_state:
            return
        try:
            state.write(self.state_dir, described)
        except OSError as exc:  # the mesh must survive a full disk
            self._report_problem(f"cannot write {state.mesh_file(self.state_dir)}: {exc.strerror}")
        else:
            self._last_state = described


def _ending(code: int) -> str:
    return f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
