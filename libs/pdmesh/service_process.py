"""Runs a service process: reads settings, sets up telemetry, signals and the operators' endpoint,
then runs the service's `main`.

SIGTERM or SIGINT asks for an orderly stop (`App.stopping`). A second signal ends the process at
once, with the exit code 128 plus the signal's number. The exit code is 0 after an orderly stop and
1 after a failure. It is 2 for a bad setting, and for an engine that can never start with its
settings.
"""

from __future__ import annotations

import argparse
import asyncio
import atexit
import contextlib
import gc
import os
import secrets
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

import structlog
from opentelemetry.sdk.resources import Resource
from starlette.routing import Route

from pdmesh import __version__
from pdmesh.atomic_file import write_atomically
from pdmesh.config import (
    BadSetting,
    ServiceSettings,
    SettingLine,
    describe,
    unknown_variables,
    without_password,
)
from pdmesh.core.access.exposure import is_exposed, lacks_mesh_token, lacks_tls
from pdmesh.core.control.restart_policy import BAD_SETTING
from pdmesh.errors import EngineMisconfigured, MeshError
from pdmesh.net.addresses import join
from pdmesh.net.grpc import rpc
from pdmesh.net.tasks import end
from pdmesh.net.tls.own_certificate import own_certificates, use_certificates
from pdmesh.telemetry import logs, metrics, names, traces
from pdmesh.telemetry.gc_watch import GcWatch
from pdmesh.telemetry.loop_watch import LoopWatch
from pdmesh.telemetry.ops_server import OpsServer

if TYPE_CHECKING:
    from pdmesh.net.tls.certificate_renewal import CertificateFolder

S = TypeVar("S", bound=ServiceSettings)
T = TypeVar("T")
LoopFactory = Callable[[], asyncio.AbstractEventLoop]
log = structlog.get_logger(__name__)

_GC_NEW_OBJECTS: Final = 20_000
_FLUSH_MS: Final = 2000
_TELL_AGAIN_S: Final = 1.0
_ALLOW_PLAIN_TEXT: Final = "set PDMESH_INSECURE_NETWORK=true on a network that you trust"


class StoppedEarly(Exception):
    """The process was asked to stop while it started, so there is nothing to drain."""


class StartupError(Exception):
    """The process cannot start or continue, for a reason that an operator can fix.

    The process logs one line and exits with code 1.
    """


@dataclass
class App:
    """The process, as its service sees and controls it."""

    service: str
    instance_id: str
    incarnation: int  # random, 63 bits, never 0
    stopping: asyncio.Event
    ops_address: str = ""  # host:port of /metrics, /health/live, /health/ready
    pages: dict[str, Callable[[], object]] = field(default_factory=dict)  # JSON of /status/<page>
    add_routes: Callable[[Sequence[Route]], None] = lambda routes: None  # adds to the ops endpoint
    _checks: dict[str, Callable[[], bool]] = field(default_factory=dict)

    def add_readiness(self, name: str, is_ready: Callable[[], bool]) -> None:
        """Add a check. /health/ready answers 200 while all checks are true."""
        self._checks[name] = is_ready

    def not_ready(self) -> list[str]:
        missing = [name for name, is_ready in self._checks.items() if not is_ready()]
        if not self._checks:
            missing.append("started")  # `main` has not added its checks yet
        return ["stopping", *missing] if self.stopping.is_set() else missing

    async def unless_stopping(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for `work`, which may take any time, and return its result.

        Raises StoppedEarly if the process is asked to stop before `work` is done.
        """
        task = asyncio.create_task(work)
        try:
            await self.until_stopping(task)
            if not task.done():
                raise StoppedEarly
            return task.result()
        finally:
            await end([task])

    async def until_stopping(self, *works: asyncio.Future[Any]) -> None:
        """Wait until the process is asked to stop or all `works` are done.

        Without `works`, only the request to stop ends the wait. If one of the `works` fails, its
        error is raised.
        """
        stopping = asyncio.create_task(self.stopping.wait())
        pending = set(works)
        try:
            while not stopping.done() and (pending or not works):
                done, _ = await asyncio.wait(
                    [stopping, *pending], return_when=asyncio.FIRST_COMPLETED
                )
                for work in done & pending:
                    work.result()
                pending -= done
        finally:
            stopping.cancel()


def new_incarnation() -> int:
    return secrets.randbelow(2**63 - 1) + 1


def run(
    service: str,
    settings_type: type[S],
    main: Callable[[S, App], Awaitable[None]],
    *,
    help_note: str = "",
) -> None:
    """Run `main` until it returns, then exit the process.

    `main` should return soon after `app.stopping` is set.
    """
    _parse_arguments(service, settings_type, help_note)
    os.umask(0o077)  # only this user may read the process's files: state, usage, tokens, KV
    settings = _load(service, settings_type)
    logs.configure(service, settings.instance_id, settings.log_format, settings.log_level)
    logs.take_over_stderr()
    if unknown := unknown_variables(settings_type, os.environ):
        log.warning(
            "service.settings_unknown", variables=unknown
        )  # only a warning, because versions are mixed during an upgrade
    with asyncio.Runner(loop_factory=_loop_factory(settings.uvloop)) as runner:
        # Exit within the block. At its end, the Runner would wait for every task, and a task that
        # the stop interrupted may never end.
        _leave(runner.run(_serve(service, settings, main)))


def _leave(code: int) -> NoReturn:
    """Exit without the interpreter's finalisation.

    The finalisation would take half a second, and native libraries may crash during it.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # a full disk
            stream.flush()
    os._exit(code)


async def _serve(service: str, settings: S, main: Callable[[S, App], Awaitable[None]]) -> int:
    app = App(service, settings.instance_id, new_incarnation(), asyncio.Event())
    _stop_on_signals(app.stopping)
    try:
        _join_mesh(service, settings)
        async with _observed(settings, app):
            await main(settings, app)
    except StoppedEarly:
        pass
    except EngineMisconfigured as exc:  # another start would fail too, as with a bad setting
        log.error("service.failed", reason=str(exc))
        return BAD_SETTING
    except (StartupError, MeshError) as exc:
        log.error("service.failed", reason=str(exc))
        return 1
    except BadSetting as exc:  # the problem is in a file that a setting names
        log.error("service.failed", reason=f"bad setting {exc}")
        return BAD_SETTING
    except Exception:
        log.exception("service.crashed")
        return 1
    log.info("service.stopped")
    return 0


def _join_mesh(service: str, settings: ServiceSettings) -> None:
    """Set up the mesh token and the certificates for calls between the mesh's processes.

    The ports for these calls trust their callers. So on an address that others can reach, callers
    must show a certificate, or at least the mesh token. Raises StartupError, BadCertificates,
    BadSetting.
    """
    _check_network(settings)
    token = settings.read_mesh_token()
    has_tls = settings.tls_dir is not None
    if lacks_mesh_token(settings.inner_host, has_token=bool(token), has_tls=has_tls):
        raise StartupError(
            f"refusing to listen on {settings.inner_host} without a mesh token: set "
            "PDMESH_MESH_TOKEN or "
            "PDMESH_MESH_TOKEN_FILE, the same for all processes of the mesh"
        )
    rpc.use_mesh_token(token)
    if settings.nats_roles and not has_tls:
        raise StartupError(
            "PDMESH_NATS_ROLES needs PDMESH_TLS_DIR: NATS knows a process by its certificate"
        )
    use_certificates(_certificates(service, settings), nats_roles=settings.nats_roles)


def _check_network(settings: ServiceSettings) -> None:
    """Raises StartupError if plain text would leave the machine and the settings forbid that."""
    is_trusted, has_tls = settings.insecure_network, settings.tls_dir is not None
    if lacks_tls(settings.inner_host, has_tls=has_tls, is_trusted=is_trusted):
        raise StartupError(
            f"refusing to listen on {settings.inner_host} without TLS: set PDMESH_TLS_DIR (pdmesh "
            f"certs makes certificates), or {_ALLOW_PLAIN_TEXT}"
        )
    for field_name, scheme in (("nats_url", "tls"), ("redis_url", "rediss")):
        url = getattr(settings, field_name, None)  # not every service has Redis
        if url is not None and not is_trusted and is_exposed(url):
            raise StartupError(
                f"refusing to use {without_password(url)} without TLS: begin "
                f"PDMESH_{field_name.upper()} with {scheme}://, or "
                f"{_ALLOW_PLAIN_TEXT}"
            )


def _certificates(service: str, settings: ServiceSettings) -> CertificateFolder | None:
    """The certificates of this process.

    Raises BadCertificates, or StartupError if the certificate is for another process.
    """
    if settings.tls_dir is None:
        return None
    from pdmesh.net.tls.certificate_renewal import CertificateFolder

    found = CertificateFolder(settings.tls_dir)
    named = found.identity
    if (named.role, named.instance_id) != (service, settings.instance_id):
        prefix = type(settings).model_config.get("env_prefix", "")
        raise StartupError(
            f"the certificate in {settings.tls_dir} is for {named}, but this process is "
            f"{service}/{settings.instance_id}: set {prefix}TLS_DIR and {prefix}INSTANCE_ID"
        )
    return found


@contextlib.asynccontextmanager
async def _observed(settings: ServiceSettings, app: App) -> AsyncIterator[None]:
    """Run telemetry and the operators' endpoint, for as long as `main` runs."""
    resource = Resource.create(
        {
            "service.name": app.service,
            "service.instance.id": app.instance_id,
            "service.version": __version__,
        }
    )
    meters = metrics.configure(
        resource, settings.otlp_endpoint, has_vllm_names=settings.vllm_metric_names
    )
    tracers = traces.configure(resource, settings.otlp_endpoint)
    ops = _open_ops(settings, app)
    ops.start()
    app.add_routes = ops.add_routes
    app.ops_address = join(settings.reachable_host, ops.port)
    telling = _told(settings.ops_file, app.ops_address)
    log.info("service.started", version=__version__, pid=os.getpid(), ops_address=app.ops_address)
    metrics.gauge(names.READY, "1 if /health/ready answers 200", lambda: not app.not_ready())
    if (certificates := own_certificates()) is not None:
        metrics.gauge(
            names.CERTIFICATE_LEFT,
            "Time until this process's certificate expires",
            certificates.seconds_left,
            "s",
        )
    watch = asyncio.create_task(LoopWatch(settings.loop_watch_s).run(), name="loop-watch")
    calm_the_collector()
    collections = GcWatch()
    collections.start()
    try:
        yield
    finally:
        collections.stop()
        if telling is not None:
            telling.cancel()
        watch.cancel()
        await ops.close()
        # Both calls block for a bounded time if the OTLP collector does not answer.
        await asyncio.to_thread(tracers.shutdown)
        await asyncio.to_thread(meters.shutdown, _FLUSH_MS)


def _told(ops_file: Path | None, address: str) -> asyncio.Task[None] | None:
    """Write the address to the file at once. If that fails, return a task that tries again.

    A full disk must not stop a service.
    """
    if ops_file is None:
        return None
    try:
        write_atomically(ops_file, address)
    except OSError as exc:
        log.warning("service.ops_file_not_written", path=str(ops_file), reason=exc.strerror)
        return asyncio.create_task(_tell(ops_file, address), name="ops-file")
    return None


async def _tell(ops_file: Path, address: str) -> None:
    while True:
        await asyncio.sleep(_TELL_AGAIN_S)
        with contextlib.suppress(OSError):
            return write_atomically(ops_file, address)


def calm_the_collector() -> None:
    """Exclude all present objects from garbage collection, and collect less often.

    Most objects of a busy service live as long as a request, and reference counting frees them
    without the collector.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GC_NEW_OBJECTS, 20, 20)


def exclude_from_collection() -> None:
    """Exclude all present objects from garbage collection, without collecting first.

    vLLM's libraries alone have 600,000 objects. A collection that visits these objects takes some
    hundred milliseconds, in which the instance does nothing else.
    """
    gc.freeze()


def collect_everything() -> None:
    """Free all garbage, also among the excluded objects. Then exclude all remaining objects."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def _open_ops(settings: ServiceSettings, app: App) -> OpsServer:
    try:
        return OpsServer(settings.inner_host, settings.ops_port, app.not_ready, app.pages)
    except OSError as exc:
        variable = f"{type(settings).model_config.get('env_prefix', '')}OPS_PORT"
        raise StartupError(
            f"cannot listen on {settings.inner_host}:{settings.ops_port} ({exc.strerror}); set "
            f"{variable}"
        ) from exc


def _stop_on_signals(stopping: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()

    def on_signal(number: signal.Signals) -> None:
        if stopping.is_set():
            os._exit(128 + number)
        log.info("service.stopping", signal=number.name)
        stopping.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)


def _loop_factory(use_uvloop: bool) -> LoopFactory:
    if use_uvloop:
        try:
            import uvloop
        except ImportError:
            return asyncio.new_event_loop
        return uvloop.new_event_loop
    return asyncio.new_event_loop


def _parse_arguments(service: str, settings_type: type[ServiceSettings], note: str) -> None:
    """Handle --help, --version and --print-config. With any of them, print something and exit."""
    parser = argparse.ArgumentParser(
        prog=f"pdmesh-{service}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=f"The {service} of a pdmesh. It is configured by its environment.{note}",
        epilog="\n".join(["settings:", *map(_help_line, describe(settings_type))]),
    )
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument(
        "--print-config", action="store_true", help="show the settings in effect and exit"
    )
    if parser.parse_args().print_config:
        _print_config(service, settings_type)
        sys.exit(0)


def _print_config(service: str, settings_type: type[ServiceSettings]) -> None:
    for line in describe(settings_type, _load(service, settings_type)):
        print(f"{line.variable}={line.value}")


def _load(service: str, settings_type: type[S]) -> S:
    try:
        return settings_type.load()
    except BadSetting as exc:
        print(f"pdmesh-{service}: bad setting {exc}", file=sys.stderr)
        sys.exit(BAD_SETTING)


def _help_line(line: SettingLine) -> str:
    also = f" (or {line.shared_variable})" if line.shared_variable else ""
    return (
        f"  {line.variable}{also}\n      {line.help}; {line.type_name}, default: "
        f"{line.default or 'none'}"
    )
