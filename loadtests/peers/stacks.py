"""Starts the stacks: ours, Dynamo, sglang-router, and a passthrough as the simplest gateway.

Dynamo and sglang-router run with prefill and decode apart, as ours does. Each stack serves on the
loopback interface, with engines that compute nothing. Our engines still move the bytes of the KV.
The engines of the others do not.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import httpx

from loadtests.harness.generator import ROOT
from loadtests.peers.cases import PATH, WARM_UP
from loadtests.peers.install import DYNAMO, SGLANG_ROUTER, Unavailable, compiled, python_of
from pdmesh.launcher.mesh import Mesh
from pdmesh.launcher.spec import MeshSpec

OURS, OURS_8, DYNAMO_PD = "pdmesh", "pdmesh, 8 prefill slots", "Dynamo P/D"
PASSTHROUGH, SGLANG_PD = "aiohttp passthrough", "sglang-router P/D"
_MODEL_DIR: Final = ROOT / ".cache/models/SmolLM2-135M-Instruct"
_START_S: Final = 120.0
_STOP_S: Final = 5.0
_LOG_CHARS: Final = 400
_FIRST_PORT: Final = 21000
_MAX_TRIES: Final = 1000
_PORTS: Final = itertools.cycle(range(_FIRST_PORT, 1 << 15))  # a run uses each port only once


@dataclass(frozen=True, slots=True)
class Serving:
    port: int
    pids: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Stack:
    """A stack that can be started.

    `serve` raises Unavailable if the stack cannot be installed or does not answer.
    """

    name: str
    serve: Callable[[], AbstractAsyncContextManager[Serving]]


@dataclass(slots=True)
class Family:
    """Processes that end together. Their output is written to files in `folder`."""

    folder: Path
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(
        self, name: str, command: Sequence[object], env: Mapping[str, str] | None = None
    ) -> None:
        with (self.folder / f"{name}.log").open("wb") as log:
            self.processes[name] = subprocess.Popen(
                list(map(str, command)),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**os.environ, **(env or {})},
                cwd=ROOT,
                start_new_session=True,
            )

    def stop(self) -> None:
        for how in (signal.SIGTERM, signal.SIGKILL):
            for process in self.processes.values():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, how)
            for process in self.processes.values():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_STOP_S)

    def pids(self) -> dict[str, int]:
        return {name: process.pid for name, process in self.processes.items()}

    def died(self) -> str:
        """The last output of a process that has ended; empty if no process has ended."""
        for name, process in self.processes.items():
            if process.poll() is not None:
                said = " ".join((self.folder / f"{name}.log").read_text(errors="replace").split())
                return f"{name} ended with {process.returncode}: {said[-_LOG_CHARS:]}"
        return ""


@contextmanager
def _family() -> Iterator[Family]:
    with tempfile.TemporaryDirectory(prefix="pdmesh-peers-") as folder:
        family = Family(Path(folder))
        try:
            yield family
        finally:
            family.stop()


def _free_ports(count: int) -> list[int]:
    """Free ports below 2^15, because Dynamo reads some ports as signed 16-bit integers."""
    with contextlib.ExitStack() as stack:
        found: list[int] = []
        for port in itertools.islice(_PORTS, _MAX_TRIES):
            with contextlib.suppress(OSError):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
                found.append(port)
            if len(found) == count:
                return found
    raise Unavailable(f"no {count} free ports from {_FIRST_PORT} on")


async def _until_it_answers(stack: str, port: int, died: Callable[[], str]) -> None:
    """Wait until the stack answers.

    Raises Unavailable if a process of the stack ends, or if there is no answer in time.
    """
    url, last = f"http://127.0.0.1:{port}{PATH}", "no answer"
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_START_S), httpx.AsyncClient(trust_env=False) as client:
            while True:
                if what := died():
                    raise Unavailable(f"{stack}: {what}")
                with contextlib.suppress(httpx.HTTPError):
                    headers = {"content-type": "application/json"}
                    answer = await client.post(url, content=WARM_UP.body, headers=headers)
                    if answer.status_code == 200:
                        return
                    last = f"status {answer.status_code}: {answer.text[:_LOG_CHARS]}"
                await asyncio.sleep(0.1)
    raise Unavailable(f"{stack}: {last} within {_START_S:.0f} s")


@asynccontextmanager
async def _pdmesh(name: str, settings: Mapping[str, str]) -> AsyncIterator[Serving]:
    spec = MeshSpec(
        engine="sim",
        num_gateways=2,
        num_prefill=1,
        num_decode=1,
        http_port=0,
        grpc_port=0,
        service_env={
            role: {f"PDMESH_{role.upper()}_{key}": value for key, value in settings.items()}
            for role in ("prefill", "decode")
        },
    )
    with tempfile.TemporaryDirectory(prefix="pdmesh-peers-") as folder:
        async with Mesh(spec, Path(folder), report=lambda line: None) as mesh:
            port = urlsplit(mesh.http_url).port
            assert port is not None
            await _until_it_answers(name, port, lambda: "")
            yield Serving(port, {each: mesh.pid(each) for each in mesh.names})


@asynccontextmanager
async def _dynamo() -> AsyncIterator[Serving]:
    """Dynamo's frontend with the KV router, and two mockers: one for prefill, one for decode."""
    python = python_of("dynamo", DYNAMO)
    port, *system = _free_ports(3)
    plane = ["--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq"]
    with _family() as family:
        env = {
            "DYN_FILE_KV": str(family.folder),
            "DYN_LOG": "error",
            "DYN_DISABLE_TELEMETRY": "1",
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
        }
        at = ["--http-host", "127.0.0.1", "--http-port", str(port), "--router-mode", "kv"]
        family.start("frontend", [python, "-m", "dynamo.frontend", *at, *plane], env)
        model = ["--model-path", str(_MODEL_DIR), "--model-name", "default"]
        law = ["--speedup-ratio", "1000", "--block-size", "16"]
        for mode, own in zip(("prefill", "decode"), system, strict=True):
            command = [python, "-m", "dynamo.mocker", *model, *law, "--disaggregation-mode", mode]
            family.start(mode, [*command, *plane], env | {"DYN_SYSTEM_PORT": str(own)})
        await _until_it_answers(DYNAMO_PD, port, family.died)
        yield Serving(port, family.pids())


@asynccontextmanager
async def _sglang() -> AsyncIterator[Serving]:
    """sglang's router with two prefills and two decodes in C, which answer at once."""
    python, worker = python_of("sglang-router", SGLANG_ROUTER), compiled("worker")
    port, metrics, *others = _free_ports(6)
    with _family() as family:
        told: list[str] = []
        for number, (role, own) in enumerate(zip(("prefill", "decode") * 2, others, strict=True)):
            family.start(f"{role}-{number}", [worker, str(own), role])
            told += [f"--{role}", f"http://127.0.0.1:{own}"]
            told += [str(9000 + number)] if role == "prefill" else []
        at = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics)]
        how = ["--pd-disaggregation", "--policy", "cache_aware", "--log-level", "error"]
        family.start("router", [python, "-m", "sglang_router.launch_router", *at, *how, *told])
        await _until_it_answers(SGLANG_PD, port, family.died)
        yield Serving(port, family.pids())


@asynccontextmanager
async def _passthrough() -> AsyncIterator[Serving]:
    """The simplest gateway in front of a worker in C. It prints its port when it serves."""
    worker = compiled("worker")
    (upstream,) = _free_ports(1)
    with _family() as family:
        family.start("worker", [worker, str(upstream), "regular"])
        module = [sys.executable, "-m", "loadtests.harness.passthrough", str(upstream)]
        family.start("passthrough", module)
        log = family.folder / "passthrough.log"
        async with asyncio.timeout(_START_S):
            while not log.read_text().endswith("\n"):
                if what := family.died():
                    raise Unavailable(f"{PASSTHROUGH}: {what}")
                await asyncio.sleep(0.05)
        port = int(log.read_text())
        await _until_it_answers(PASSTHROUGH, port, family.died)
        yield Serving(port, family.pids())


_ZERO: Final = {"SIM_LAW": "zero"}  # computing takes no time
_ROOM: Final = {"NUM_SLOTS": "256", "MAX_RETRIEVALS": "256"}
STACKS: Final = (
    Stack(OURS, partial(_pdmesh, OURS, _ZERO | _ROOM)),
    Stack(OURS_8, partial(_pdmesh, OURS_8, _ZERO)),
    Stack(DYNAMO_PD, _dynamo),
    Stack(PASSTHROUGH, _passthrough),
    Stack(SGLANG_PD, _sglang),
)
