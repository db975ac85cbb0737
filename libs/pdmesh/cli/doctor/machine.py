"""Examines this machine: limits, memory, disk, ports, server programs, the engine and UCX."""

from __future__ import annotations

import importlib.util
import os
import re
import resource
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from pdmesh.cli.doctor.diagnosis import Diagnosis, ok, problem, warning
from pdmesh.embedded.binaries import NATS, VALKEY, Program, ServerNotFound, find
from pdmesh.embedded.ports import PortReservation, PortTaken
from pdmesh.engine.vllm.child import cpu_features
from pdmesh.kv.transport.ucx_worker import load_library

GIB: Final = 1 << 30
_MIN_FILES: Final = 4096  # a gateway with 1000 clients needs more than two files per client
_MIN_FREE: Final = {"state": 2 * GIB, "shared memory": GIB}
_MIN_MEMORY: Final = {"vllm": 4 * GIB, "sim": GIB}
_SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108  only its free space is read
_INFINIBAND: Final = Path("/sys/class/infiniband")
_RESOURCE: Final = re.compile(r"-- (\w+)/")
_RDMA: Final = frozenset({"rc_mlx5", "rc_verbs", "dc_mlx5", "ud_mlx5", "ud_verbs"})


def examine_machine(engine: str, state_dir: Path, ports: Iterable[int]) -> Iterator[Diagnosis]:
    """`ports` are the ports on which a mesh would listen.

    The list is empty while a mesh runs here.
    """
    yield of_open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    yield of_memory(_available_memory(), engine)
    yield of_room("shared memory", _SHARED_MEMORY)
    yield of_room("state", _that_exists(state_dir.absolute()))
    yield from map(of_port, ports)
    yield of_program("NATS", NATS)
    yield of_program("Valkey", VALKEY)
    yield of_engine(engine)
    if engine == "vllm":
        yield of_processor(cpu_features.own_flags())
        yield of_ucx(_ucx_transports(), _rdma_devices())
        yield from of_locked_memory(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], _rdma_devices())


def of_open_files(limit: int) -> Diagnosis:
    if limit == resource.RLIM_INFINITY or limit >= _MIN_FILES:
        return ok("open files", f"{limit} at once")
    raise_it = f"raise it: ulimit -n {_MIN_FILES}, or LimitNOFILE= of the unit"
    return warning("open files", f"a process may open only {limit}", raise_it)


def of_memory(available: int, engine: str) -> Diagnosis:
    text = f"{available / GIB:.1f} GiB available"
    if available >= _MIN_MEMORY[engine]:
        return ok("memory", text)
    needed = f"a mesh on {engine} needs about {_MIN_MEMORY[engine] / GIB:.0f} GiB"
    return warning("memory", text, f"{needed}: free some, or start fewer instances")


def of_room(what: str, path: Path) -> Diagnosis:
    free = shutil.disk_usage(path).free
    text = f"{free / GIB:.1f} GiB free in {path}"
    if free >= _MIN_FREE[what]:
        return ok(f"room for {what}", text)
    return warning(f"room for {what}", text, f"free at least {_MIN_FREE[what] / GIB:.0f} GiB")


def of_port(port: int) -> Diagnosis:
    try:
        with PortReservation("127.0.0.1", port):
            return ok(f"port {port}", "free")
    except PortTaken as exc:
        return problem(f"port {port}", str(exc), "stop it, or choose another: pdmesh up --help")


def of_program(name: str, program: Program) -> Diagnosis:
    try:
        return ok(name, str(find(program)))
    except ServerNotFound as exc:
        remedy = "install it, or use a server that runs: --nats-url, --redis-url"
        return problem(name, str(exc), remedy)


def of_engine(engine: str) -> Diagnosis:
    if engine == "sim" or importlib.util.find_spec("vllm") is not None:
        return ok("engine", f"{engine} is there")
    remedy = "make setup ENGINE=vllm, or start with: pdmesh up --engine sim"
    return problem("engine", "vLLM is not installed", remedy)


def of_processor(flags: frozenset[str]) -> Diagnosis:
    if slow := cpu_features.slow_for("bfloat16", flags):
        return warning("processor", slow, "on CPUs, start with: pdmesh up --dtype float32")
    return ok("processor", "computes bfloat16 fast")


def of_ucx(transports: frozenset[str] | str, rdma_devices: list[str]) -> Diagnosis:
    """`transports` are the transports of UCX, or a text that says why UCX cannot be loaded."""
    if isinstance(transports, str):
        return problem("UCX", transports, "make setup ENGINE=vllm")
    if rdma_devices and not transports & _RDMA:
        return warning(
            "UCX",
            f"there is {', '.join(rdma_devices)}, but this UCX has no RDMA: KV goes over TCP",
            "install UCX with verbs, and set RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY=true",
        )
    return ok("UCX", f"moves KV over {', '.join(sorted(transports))}")


def of_locked_memory(limit: int, rdma_devices: list[str]) -> Iterator[Diagnosis]:
    if rdma_devices and limit != resource.RLIM_INFINITY:
        text = f"only {limit} bytes may be locked, and RDMA locks all memory that it moves"
        yield warning("locked memory", text, "ulimit -l unlimited, or LimitMEMLOCK=infinity")


def _that_exists(path: Path) -> Path:
    """The path, or the nearest folder above it that exists."""
    return next(each for each in (path, *path.parents) if each.exists())


def _available_memory() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _rdma_devices() -> list[str]:
    return sorted(p.name for p in _INFINIBAND.iterdir()) if _INFINIBAND.is_dir() else []


def _ucx_transports() -> frozenset[str] | str:
    try:
        library: Any = load_library()
    except (ImportError, OSError) as exc:
        return f"cannot be loaded: {exc}"
    return transports_in(library.UCXContext({}).info)


def transports_in(info: str) -> frozenset[str]:
    """The transports in UCX's description of a context.

    The description has lines such as `resource 1 : ... -- tcp/eth0`.
    """
    return frozenset(_RESOURCE.findall(info)) - {"self"}
