"""`pdmesh up`: starts a mesh and reports progress.

The command runs until Ctrl-C. With --detach, it leaves the mesh running and returns.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Final

from pdmesh import api_keys
from pdmesh.cli.connect import be_quiet
from pdmesh.cli.errors import CommandFailed
from pdmesh.cli.hints import hint
from pdmesh.cli.texts import text_of
from pdmesh.config import url_problem, without_password
from pdmesh.core.access.exposure import is_exposed, lacks_keys, lacks_tls
from pdmesh.core.groups.desired import Desired
from pdmesh.core.instance.engine_args import refusal
from pdmesh.desired_file import read
from pdmesh.embedded.ports import PortTaken
from pdmesh.engine.vllm.child import cpu_features
from pdmesh.engine.vllm.config import installed_device
from pdmesh.errors import InvalidRequest
from pdmesh.launcher import state
from pdmesh.launcher.hosts.folder import HostFolder
from pdmesh.launcher.mesh import Mesh, MeshFailed
from pdmesh.launcher.spec import MeshSpec, asked_of
from pdmesh.models import smollm2

_POLL_S: Final = 0.1
# Options and their defaults. --host-folder forbids these options, because host.json replaces them.
_SAID_BY_A_HOST: Final[Mapping[str, object]] = {
    "--regions": None,
    "--nats-url": None,
    "--redis-url": None,
    "--prefill": None,
    "--decode": None,
    "--fusion": False,
    "--encoder": 0,
    "--pooling": 0,
    "--blank": 0,
    "--gateways": 1,
    "--masters": 1,
    "--node-agent": False,
}
_REGION: Final = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
# This variable is set for a detached launcher, which must not detach again.
_DETACHED: Final = "PDMESH_DETACHED"
# The variables for the number format of stored KV: the shared variable, and each service's own.
_KV_DTYPE_VARIABLES: Final = (
    "PDMESH_KV_CACHE_DTYPE",
    "PDMESH_PREFILL_KV_CACHE_DTYPE",
    "PDMESH_DECODE_KV_CACHE_DTYPE",
    "PDMESH_INSTANCE_KV_CACHE_DTYPE",
)
# The gateways' settings for access. If one of them is set, `up` needs no option about keys.
_ACCESS_VARIABLES: Final = (
    "PDMESH_GATEWAY_KEYS_FILE",
    "PDMESH_GATEWAY_ALLOW_ANONYMOUS",
    "PDMESH_OIDC_ISSUER",
    "PDMESH_GATEWAY_OIDC_ISSUER",
)


def run(options: argparse.Namespace) -> int:
    spec = _spec(options)
    if (running := state.read(options.state_dir)) is not None:
        return _is_up_already(running, spec, options.state_dir)
    try:
        if options.detach and _DETACHED not in os.environ:
            return _detach(options)
        with asyncio.Runner() as runner:
            return runner.run(_serve(spec, options.state_dir))
    except (MeshFailed, state.MeshRunning, PortTaken) as exc:
        raise CommandFailed(str(exc)) from None
    except BrokenPipeError:  # the output's reader has ended
        raise
    except OSError as exc:  # disk full, no permission
        raise CommandFailed(f"{exc.strerror}: {exc.filename or options.state_dir}") from exc


def _is_up_already(running: state.MeshState, spec: MeshSpec, state_dir: Path) -> int:
    """Return 0 if the running mesh has the same options and is ready.

    Raises CommandFailed otherwise.
    """
    is_ready = running.phase == "ready"
    phase = "up" if is_ready else running.phase
    found = f"a mesh is already {phase} (pid {running.pid})"
    others = [
        f"{option} {running.asked[option]}, not {value}"
        for option, value in asked_of(spec).items()
        if running.asked.get(option, value) != value
    ]
    if others:
        found += f" with other options: {'; '.join(others)}"
    how = f"{found}; stop it with: {hint(state_dir, 'down')}"
    if others or not is_ready:
        raise CommandFailed(how)
    print(how)
    print(_what_next(running.http_url, running.grpc_address, state_dir, spec))
    return 0


def _spec(options: argparse.Namespace) -> MeshSpec:
    per_role = 2 if options.engine == "sim" else 1
    groups_file, desired = _groups_file(options)
    _check_processor(options, desired)
    host = None if options.host_folder is None else _host(options)
    if host is None:
        _check_network(options)
    is_assigned = options.groups is not None
    default = 0 if options.fusion or is_assigned else per_role
    spec = MeshSpec(
        engine=options.engine,
        num_prefill=default if options.prefill is None else options.prefill,
        num_decode=default if options.decode is None else options.decode,
        num_fusion=1 if options.fusion else 0,
        num_pooling=options.pooling,
        num_encoder=options.encoder,
        pooling_model_dir=_pooling_model_dir(options),
        num_blank=options.blank,
        groups_file=groups_file,
        regions=_regions(options, desired.regions),
        num_gateways=options.gateways,
        num_masters=options.masters,
        node_agent=options.node_agent,
        host=options.host,
        inner_host=options.inner_host,
        http_port=options.http_port,
        grpc_port=options.grpc_port,
        model_dir=_model_dir(options),
        dtype=options.dtype,
        engine_args=_engine_args(options),
        tool_parser=options.tool_parser,
        reasoning_parser=options.reasoning_parser,
        nats_url=options.nats_url,
        redis_url=options.redis_url,
        keys_file=_keys_file(options),
        allow_anonymous=options.allow_anonymous,
        tls=options.tls,
        insecure_network=options.insecure_network,
        start_timeout_s=options.timeout,
    )
    return spec if host is None else host.spec(spec)


def _host(options: argparse.Namespace) -> HostFolder:
    """Read the host's folder. Raises CommandFailed for an option that host.json replaces."""
    for option, default in _SAID_BY_A_HOST.items():
        if getattr(options, option[2:].replace("-", "_")) != default:
            raise CommandFailed(f"{option}: not with --host-folder, whose host.json replaces it", 2)
    return HostFolder.read(options.host_folder)


def _groups_file(options: argparse.Namespace) -> tuple[Path | None, Desired]:
    """Read the --groups file before the start, so that errors are reported at once."""
    if options.groups is None:
        return None, Desired()
    file: Path = options.groups.absolute()
    try:
        desired = read(text_of(options.groups))
    except InvalidRequest as exc:
        raise CommandFailed(f"{options.groups}: {exc.message}") from None
    return file, desired


def _check_network(options: argparse.Namespace) -> None:
    """Raises CommandFailed if the options would send plain text over a network.

    Each process would refuse this itself, but only after its start and in its own log.
    """
    is_trusted = options.insecure_network or "PDMESH_INSECURE_NETWORK" in os.environ
    has_tls = options.tls or "PDMESH_TLS_DIR" in os.environ
    if lacks_tls(options.inner_host, has_tls=has_tls, is_trusted=is_trusted):
        raise CommandFailed(
            f"other machines can reach {options.inner_host}: give --tls, or --insecure-network on "
            "a trusted network"
        )
    for option, url, scheme in (
        ("--nats-url", options.nats_url, "tls"),
        ("--redis-url", options.redis_url, "rediss"),
    ):
        if url is not None and not is_trusted and not url_problem(url) and is_exposed(url):
            raise CommandFailed(
                f"{option}: {without_password(url)} is not encrypted: begin it with {scheme}://, "
                "or give --insecure-network on a trusted network"
            )


def _check_processor(options: argparse.Namespace, desired: Desired) -> None:
    """Raises CommandFailed for a number format of KV that this machine's processor lacks.

    Each instance would refuse this itself, but only after its start. For a slow format of the
    model, this only prints a warning.
    """
    if options.engine != "vllm" or installed_device() != "cpu":
        return
    flags = cpu_features.own_flags()
    asked = [(name, os.environ[name]) for name in _KV_DTYPE_VARIABLES if name in os.environ]
    for name, service in desired.services.items():
        for each in (service.options, *service.role_options.values()):
            asked += [
                (f"{options.groups}: services.{name}", value)
                for option, value in each.items()
                if option == "kv_cache_dtype"
            ]
    for where, value in asked:
        if missing := cpu_features.missing_for(value, flags):
            raise CommandFailed(f"{where}: {missing}")
    if options.dtype and (slow := cpu_features.slow_for(options.dtype, flags)):
        _say(slow)


def _engine_args(options: argparse.Namespace) -> dict[str, str]:
    """The arguments for vLLM, checked as far as possible without vLLM. Raises CommandFailed."""
    if options.engine_arg and options.engine != "vllm":
        raise CommandFailed(f"--engine-arg: the engine {options.engine} takes no arguments of vLLM")
    for name, _ in options.engine_arg:
        if reason := refusal(name):
            raise CommandFailed(f"--engine-arg {name}: {reason}")
    return dict(options.engine_arg)


def _keys_file(options: argparse.Namespace) -> Path | None:
    """Check the key file before the start. Raises CommandFailed.

    A gateway would refuse a bad file only after the instances have loaded the model.
    """
    if options.keys is not None:
        keys: Path = options.keys
        try:
            api_keys.load(keys)
        except api_keys.BadKeyFile as exc:
            how = f"make one with: pdmesh keys add TENANT --file {shlex.quote(str(keys))}"
            raise CommandFailed(f"--keys: {exc}; {how}") from None
        return keys
    is_decided = any(name in os.environ for name in _ACCESS_VARIABLES)
    is_anonymous_allowed = options.allow_anonymous
    if lacks_keys(options.host, has_keys=is_decided, is_anonymous_allowed=is_anonymous_allowed):
        raise CommandFailed(
            f"other machines can reach {options.host}: give --keys FILE (pdmesh keys add makes "
            "one), or --allow-anonymous on a trusted network"
        )
    return None


def _regions(options: argparse.Namespace, named: tuple[str, ...]) -> tuple[str, ...]:
    """The regions in --regions, or else the ones in --groups.

    Raises CommandFailed if --regions is malformed, or lacks a region that --groups has.
    """
    if options.regions is None:
        return named
    asked = tuple(options.regions.split(","))
    if bad := [region for region in asked if not _REGION.fullmatch(region)]:
        raise CommandFailed(
            f"--regions: {bad[0]!r} is not a name (lower-case letters, digits and dashes)"
        )
    if len(set(asked)) < len(asked):
        raise CommandFailed("--regions: a region is named twice")
    if missing := [region for region in named if region not in asked]:
        raise CommandFailed(f"--regions: {options.groups} also names {', '.join(missing)}")
    return asked


def _model_dir(options: argparse.Namespace) -> Path | None:
    """The model directory for the engines, or None for the simulated engine's own model."""
    if options.engine == "vllm":
        _require_vllm()
    if options.model is not None:
        return _checked_dir(options.model)
    if options.engine == "sim":
        return None
    try:
        return smollm2.ensure(smollm2.DEFAULT_DIR, report=_say).absolute()
    except smollm2.CannotPrepare as exc:
        raise CommandFailed(str(exc)) from exc


def _pooling_model_dir(options: argparse.Namespace) -> Path | None:
    """The pooling instances' model directory. None means the model of the other instances."""
    if options.pooling_model is None:
        return None
    if not options.pooling:
        raise CommandFailed("--pooling-model needs --pooling N: how many instances run it")
    return _checked_dir(options.pooling_model)


def _checked_dir(given: Path) -> Path:
    directory = given.absolute()
    if not (directory / "config.json").is_file():
        raise CommandFailed(f"{directory} is not a Hugging Face model directory (no config.json)")
    return directory


def _require_vllm() -> None:
    if importlib.util.find_spec("vllm") is None:
        raise CommandFailed(
            "vLLM is not installed; run: make setup ENGINE=vllm (or start with --engine sim)"
        )


async def _serve(spec: MeshSpec, state_dir: Path) -> int:
    be_quiet()
    os.umask(0o077)  # only this user may read the files of this process and its children
    stopping = asyncio.Event()
    mesh = Mesh(spec, state_dir, report=_print_line)
    starting = asyncio.create_task(mesh.__aenter__(), name="mesh-start")
    _on_signals(mesh, starting, stopping)
    began = time.monotonic()
    _say(f"starting {_summary(spec)}")
    try:
        await starting
    except asyncio.CancelledError:
        _say("stopped before it was ready")
        return 130
    try:
        _say(f"the mesh is ready after {time.monotonic() - began:.1f} s")
        for region in spec.regions[1:]:
            _say(f"region {region} answers at {mesh.http_url_in(region)}/v1")
        with contextlib.suppress(OSError):
            print(_what_next(mesh.http_url, mesh.grpc_address, state_dir, spec), flush=True)
        await stopping.wait()
        _say("stopping")
    finally:
        await mesh.stop()
    _say("stopped")
    return 0


def _on_signals(mesh: Mesh, starting: asyncio.Task[Mesh], stopping: asyncio.Event) -> None:
    """Stop the mesh in order at the first signal, and kill all processes at the second."""
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if stopping.is_set():
            mesh.kill_all()
        stopping.set()
        if not starting.done():
            starting.cancel()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, on_signal)


def _detach(options: argparse.Namespace) -> int:
    """Start the launcher in the background, and show its progress until the mesh is ready."""
    log_file = options.state_dir / "logs" / "launcher.log"
    state.make_private(options.state_dir)
    log_file.parent.mkdir(mode=0o700, exist_ok=True)
    log_file.unlink(missing_ok=True)
    log_file.touch(mode=0o600)
    with log_file.open("wb") as output:
        launcher = subprocess.Popen(
            [sys.executable, "-m", "pdmesh.cli.app", *sys.argv[1:]],
            env={**os.environ, _DETACHED: "1", "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    with log_file.open() as lines:
        try:
            return _follow(launcher, lines, options)
        except KeyboardInterrupt:
            launcher.terminate()
            launcher.wait()
            raise


def _follow(launcher: subprocess.Popen[bytes], lines: IO[str], options: argparse.Namespace) -> int:
    """Show the launcher's output until its mesh is ready or the launcher has ended.

    Raises CommandFailed if a signal killed the launcher, or if it failed and its output cannot say
    why, because there is none or the disk is full.
    """
    has_said = False
    while launcher.poll() is None:
        has_said |= bool(said := lines.read())
        sys.stdout.write(said)
        sys.stdout.flush()
        mesh = state.read(options.state_dir)
        if mesh is not None and mesh.pid == launcher.pid and mesh.phase == "ready":
            sys.stdout.write(lines.read())
            return 0
        time.sleep(_POLL_S)
    has_said |= bool(said := lines.read())
    sys.stderr.write(said)
    code = launcher.returncode
    if code < 0:
        raise CommandFailed(f"the launcher was killed by signal {-code}")
    if code and not (has_said and os.statvfs(options.state_dir).f_bavail):
        raise CommandFailed(
            f"the launcher ended with code {code} and could not say why: "
            f"is there room on the disk of {options.state_dir}?"
        )
    return code


def _say(line: str) -> None:
    """Print a line. Ignore errors, because the mesh must run on if nobody reads its output."""
    with contextlib.suppress(OSError):
        _print_line(line)


def _print_line(line: str) -> None:
    """Print a line and flush it. Raises OSError."""
    print(f"pdmesh: {line}", flush=True)


def _summary(spec: MeshSpec) -> str:
    roles = {
        "prefill": spec.num_prefill,
        "decode": spec.num_decode,
        "fusion": spec.num_fusion,
        "pooling": spec.num_pooling,
        "encoder": spec.num_encoder,
        "blank": spec.num_blank,
    }
    instances = (
        ", ".join(f"{count} {role}" for role, count in roles.items() if count) or "no instances"
    )
    where = f" in each of {', '.join(spec.regions)}" if spec.regions else ""
    return f"a mesh with {instances}{where} on {spec.engine}"


def _what_next(http_url: str, grpc_address: str, state_dir: Path, spec: MeshSpec) -> str:
    """Suggest commands to try next. The user can copy them as they are."""
    pdmesh = _own_command()

    def own(command: str) -> str:
        return hint(state_dir, command, program=pdmesh)

    has_keys = spec.keys_file is not None or "PDMESH_GATEWAY_KEYS_FILE" in os.environ
    file = f" --file {shlex.quote(str(spec.keys_file))}" if spec.keys_file else ""
    get_key = (
        (
            "export PDMESH_API_KEY=pdm_...   # as it was shown by: "
            f"{own(f'keys add TENANT{file}')}\n    "
        )
        if has_keys
        else ""
    )
    authorization = ' -H "Authorization: Bearer $PDMESH_API_KEY"' if has_keys else ""
    body = (
        '{"model": "default", "messages": [{"role": "user", "content": "What is the capital of '
        'France?"}], "temperature": 0}'
    )
    # Without -g, curl takes brackets in a URL for a pattern.
    shown_url = f"-g {http_url}" if "[" in http_url else http_url
    return f"""
  OpenAI API   {http_url}/v1      gRPC   {grpc_address}

  Try:
    {get_key}{own('chat "What is the capital of France?"')}
    curl {shown_url}/v1/chat/completions -H 'Content-Type: application/json'{authorization} \\
      -d '{body}'
    {own("status")}
    {own("events")}
    {own("down")}
"""


def _own_command() -> str:
    """The word that calls `pdmesh` in the user's shell: its name if on the PATH, or a path."""
    beside = Path(sys.executable).parent / "pdmesh"
    if shutil.which("pdmesh") or not beside.exists():
        return "pdmesh"
    here = Path.cwd()
    return str(beside.relative_to(here) if beside.is_relative_to(here) else beside)
