"""What tools and schemas add to a request's CPU and latency, beside vLLM's own server.

    python -m loadtests.gateway.features [--rounds 5] [--requests 16] [--out FILE]

A mesh (one gateway, one fusion instance) and a server of vLLM run all the time, with the same model
and the same parser of tool calls. Each round sends the same bodies to both, in alternating order.
"Front end" in the report is the process that speaks HTTP: the gateway with its parser process, or
vLLM's API server. "Rest" is the engine and, in the mesh, the other services. Answers are greedy, so
both servers compute the same tokens. Both engines compute in fp32, on the same number of threads.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import psutil

from loadtests.gateway.scenarios import CHAT_PATH
from loadtests.harness.client import LoadSpec
from loadtests.harness.generator import measure
from loadtests.harness.processes import ProcessSet
from loadtests.harness.progress import Progress
from loadtests.harness.results import Spread, write
from pdmesh.cores import usable_cores
from pdmesh.engine.vllm.config import threads_per_rank
from pdmesh.launcher.mesh import Mesh
from pdmesh.launcher.spec import MeshSpec

_MODEL_DIR: Final = Path(".cache/models/SmolLM2-135M-Instruct")
_NUM_TOKENS: Final = 32
_BLOCK_SIZE: Final = 64
_PARSER: Final = "hermes"
_START_S: Final = 300.0
_LONGEST_WINDOW_S: Final = 300.0
_CONCURRENCY: Final = 2
_OURS: Final = "pdmesh"
_THEIRS: Final = "vLLM's server"


@dataclass(frozen=True, slots=True)
class FeatureCost:
    """The cost of one request, on average."""

    front_end_ms: float  # CPU
    rest_ms: float  # CPU
    latency_ms: float  # the median
    num_tokens: float


@dataclass(frozen=True, slots=True)
class ServerUnderTest:
    url: str
    pids: dict[str, int]
    # the front end's CPU, computed from the CPU of all `pids`
    front_end: Callable[[dict[str, float]], float]

    def cost(self, bodies: Sequence[str]) -> FeatureCost:
        """Send each body once. Raises RuntimeError if a request is not answered."""
        url = urlsplit(self.url)
        assert url.hostname is not None
        assert url.port is not None
        spec = LoadSpec(
            url.hostname,
            url.port,
            CHAT_PATH,
            tuple(bodies),
            _CONCURRENCY,
            warmup_s=0.0,
            duration_s=_LONGEST_WINDOW_S,
            max_requests=len(bodies),
        )
        measured = measure(spec, ProcessSet(self.pids))
        load = measured.load
        if load.errors or not load.num_requests:
            raise RuntimeError(f"{self.url}: {dict(load.errors)}")
        cpu_s = {name: s for name, s in measured.cpu_s.items() if name != "generator"}
        front_end_s = self.front_end(cpu_s)
        # The CPU of "server" (vLLM's) already includes its engine, although `cpu_s` has the engine
        # as well.
        all_s = cpu_s.get("server", sum(cpu_s.values()))
        per_request = 1e3 / load.num_requests
        return FeatureCost(
            front_end_s * per_request,
            (all_s - front_end_s) * per_request,
            load.latency.quantile(0.5) * 1e3,
            load.num_tokens / load.num_requests,
        )


@contextlib.asynccontextmanager
async def mesh_under_test(model_dir: Path, folder: Path) -> AsyncIterator[ServerUnderTest]:
    spec = MeshSpec(
        engine="vllm",
        model_dir=model_dir,
        num_prefill=0,
        num_decode=0,
        num_fusion=1,
        http_port=0,
        grpc_port=0,
        tool_parser=_PARSER,
        env={"PDMESH_BLOCK_SIZE": str(_BLOCK_SIZE), "PDMESH_GATEWAY_TTFT_S": "120"},
        start_timeout_s=_START_S,
    )
    async with Mesh(spec, folder, report=lambda line: print(line, file=sys.stderr)) as mesh:
        yield ServerUnderTest(
            mesh.http_url,
            {name: mesh.pid(name) for name in mesh.names},
            lambda cpu_s: sum(s for name, s in cpu_s.items() if name.startswith("gateway")),
        )


@contextlib.contextmanager
def vllm_under_test(model_dir: Path, folder: Path) -> Iterator[ServerUnderTest]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(model_dir), "--served-model-name", "default", "--enforce-eager"),
        *("--block-size", str(_BLOCK_SIZE), "--max-model-len", "2048", "--max-num-seqs", "16"),
        *("--kv-cache-memory-bytes", str(512 << 20), "--gpu-memory-utilization", "0.3"),
        *("--dtype", "float32"),  # the type that a mesh's engine uses on a CPU
        *("--enable-auto-tool-choice", "--tool-call-parser", _PARSER, "--port", str(port)),
    ]
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(threads_per_rank(len(usable_cores()), 1)),
    }
    log_file = folder / "vllm.log"
    with log_file.open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    try:
        _wait_until_healthy(f"http://127.0.0.1:{port}/health", process, log_file)
        engines = [c.pid for c in psutil.Process(process.pid).children() if _is_engine(c)]
        pids = {"server": process.pid, **{f"engine-{i}": pid for i, pid in enumerate(engines)}}
        yield ServerUnderTest(
            f"http://127.0.0.1:{port}",
            pids,
            lambda cpu_s: (
                cpu_s["server"] - sum(s for name, s in cpu_s.items() if name.startswith("engine"))
            ),
        )
    finally:
        process.terminate()
        process.wait(60)


def _is_engine(process: psutil.Process) -> bool:
    return "EngineCore" in " ".join(process.cmdline())


def _wait_until_healthy(url: str, process: subprocess.Popen[bytes], log_file: Path) -> None:
    until = time.monotonic() + _START_S
    while True:
        if process.poll() is not None or time.monotonic() > until:
            raise SystemExit(f"vLLM's server did not start:\n{log_file.read_text()[-3000:]}")
        try:
            with urllib.request.urlopen(url, timeout=5.0):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)


def _schema(number: int) -> dict[str, Any]:
    """A schema whose answers are longer than `_NUM_TOKENS`, so all answers have that length."""
    return {
        "type": "object",
        "properties": {
            f"places_{number}": {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {"name": {"type": "string"}, "year": {"type": "integer"}},
                    "required": ["name", "year"],
                },
                "minItems": 8,
            }
        },
        "required": [f"places_{number}"],
        "additionalProperties": False,
    }


def _tools(number: int) -> list[dict[str, Any]]:
    return [
        {
            "type": "function",
            "function": {"name": name, "description": "Finds it.", "parameters": _schema(number)},
        }
        for name in ("find_places", "find_people")
    ]


def _format(number: int) -> dict[str, Any]:
    return {
        "type": "json_schema",
        "json_schema": {"name": "places", "schema": _schema(number), "strict": True},
    }


# The fields that each feature adds to a plain request. The argument is the request's number in the
# run.
FEATURES: Final[dict[str, Callable[[int], dict[str, Any]]]] = {
    "plain": lambda _: {},
    "two tools, auto": lambda _: {"tools": _tools(0), "tool_choice": "auto"},
    "two tools, required": lambda _: {"tools": _tools(0), "tool_choice": "required"},
    "a schema, always the same": lambda _: {"response_format": _format(0)},
    "a schema, new each time": lambda number: {"response_format": _format(number)},
}


def bodies(feature: str, first: int, count: int) -> list[str]:
    """The bodies of requests `first` to `first + count - 1` of a run."""
    return [
        json.dumps(
            {
                "model": "default",
                "messages": [{"role": "user", "content": f"{n}: what is there to see in Lisbon?"}],
                "max_tokens": _NUM_TOKENS,
                "temperature": 0,
                **FEATURES[feature](n),
            }
        )
        for n in range(first, first + count)
    ]


Costs = dict[str, dict[str, list[FeatureCost]]]  # by server and by feature: one cost per round


def measure_all(servers: dict[str, ServerUnderTest], rounds: int, count: int) -> Costs:
    costs: Costs = {name: {feature: [] for feature in FEATURES} for name in servers}
    progress = Progress((rounds + 1) * len(FEATURES))
    for number in range(rounds + 1):
        for index, feature in enumerate(FEATURES):
            progress.step(f"round {number}: {feature}")
            sent = bodies(feature, 1 + (number * len(FEATURES) + index) * count, count)
            for name in sorted(servers, reverse=bool(number % 2)):
                cost = servers[name].cost(sent)
                if number:  # the first round starts parsers and fills the caches of schemas
                    costs[name][feature].append(cost)
    progress.close()
    return costs


def report(costs: Costs) -> str:
    """A table whose cells have the median of the rounds, with the lowest and the highest."""
    head = (
        "| request | server | tokens | front end, CPU ms | rest, CPU ms | latency p50, ms "
        "| front end: more than plain, ms |"
    )
    lines = [head, "|---|---|---|---|---|---|---|"]
    for feature in FEATURES:
        for name, by_feature in costs.items():
            found, plain = by_feature[feature], by_feature["plain"]
            cells = [
                feature,
                name,
                Spread.of([c.num_tokens for c in found]).text(".1f"),
                Spread.of([c.front_end_ms for c in found]).text(".1f"),
                Spread.of([c.rest_ms for c in found]).text(".0f"),
                Spread.of([c.latency_ms for c in found]).text(".0f"),
                Spread.of(
                    [c.front_end_ms - p.front_end_ms for c, p in zip(found, plain, strict=True)]
                ).text(".1f"),
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


async def run(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="pdmesh-features-") as directory:
        folder = Path(directory)
        async with mesh_under_test(options.model_dir, folder / "mesh") as ours:
            with vllm_under_test(options.model_dir, folder) as theirs:
                servers = {_OURS: ours, _THEIRS: theirs}
                # In a thread, so that the launcher's event loop can go on supervising its
                # processes.
                costs = await asyncio.to_thread(
                    measure_all, servers, options.rounds, options.requests
                )
    text = report(costs)
    print(text)
    if options.out is not None:
        write(
            options.out,
            "loadtests.gateway.features",
            "What tools and schemas cost, beside vLLM's own server",
            f"{options.rounds} rounds of {options.requests} requests of each kind to each server, "
            f"{_CONCURRENCY} at a time, at most {_NUM_TOKENS} tokens each. "
            "Each cell: the median of the rounds (lowest..highest).",
            text,
            costs={
                name: {f: [asdict(c) for c in found] for f, found in by_feature.items()}
                for name, by_feature in costs.items()
            },
        )


def main() -> None:
    parser = argparse.ArgumentParser(prog="make bench NAME=features ARGS=", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=16, help="of each kind in a round")
    parser.add_argument("--model-dir", type=Path, default=_MODEL_DIR)
    parser.add_argument("--out", type=Path, help="files for the record, without suffix")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
