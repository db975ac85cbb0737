"""What the mesh adds to its engine, and how much it carries on this machine.

    python -m loadtests.gateway.overhead [--rounds 3] [--gateways K] [--fusion] [--quick]
        [--engine vllm]
    python -m loadtests.gateway.overhead --memory 100000

Each round measures the bare engine, the simplest possible gateway, and every scenario through the
mesh. All are measured in the same minutes, so that other load on the machine affects them alike.
The tables give the median of the rounds and their spread.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import urllib.request
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Final

from loadtests.gateway.bare import BareSpec, measure_bare
from loadtests.gateway.memory import measure_memory, memory_markdown
from loadtests.gateway.report import low_load, markdown
from loadtests.gateway.scenarios import (
    CHAT_PATH,
    SCENARIOS,
    SCENARIOS_REAL,
    Kind,
    Scenario,
    make_prompts,
)
from loadtests.harness.client import chat_body
from loadtests.harness.generator import canned_server, measure, passthrough
from loadtests.harness.mesh import MeshOptions, RunningMesh, running_mesh
from loadtests.harness.patience import Patience
from loadtests.harness.processes import ProcessSet
from loadtests.harness.progress import Progress
from loadtests.harness.results import Cell, Run

_RESULTS: Final = Path(__file__).resolve().parents[1] / "results"
_NUM_PROMPTS: Final = 512
_FIRST_ANSWER_S: Final = 60.0
_WARMUP_CONNECTIONS: Final = 8
_BASELINES: Final = (
    Scenario(Kind.ONE_TOKEN, 64),
    Scenario(Kind.STREAM, 1),
    Scenario(Kind.STREAM, 64),
)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="loadtests.gateway.overhead", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="rounds of everything (3)")
    parser.add_argument("--seconds", type=float, default=4.0, help="window of each cell (4)")
    parser.add_argument("--warmup", type=float, default=1.0, help="load before each window, s (1)")
    parser.add_argument("--engine", choices=("sim", "vllm"), default="sim")
    parser.add_argument("--gateways", type=int, default=1, help="gateway processes on one port (1)")
    parser.add_argument("--generators", type=int, default=1, help="load generator processes (1)")
    parser.add_argument(
        "--fusion", action="store_true", help="one fusion instance, no KV hand-over"
    )
    parser.add_argument("--words", type=int, default=32, help="words of each prompt (32)")
    parser.add_argument("--model-dir", default="", help="model directory, for --engine vllm")
    parser.add_argument("--only", default="", help="scenarios whose name contains this")
    parser.add_argument("--quick", action="store_true", help="one round of 1.5 s cells, no files")
    parser.add_argument("--memory", type=int, metavar="REQUESTS", help="the memory check instead")
    parser.add_argument(
        "--patience",
        type=float,
        default=0.0,
        metavar="S",
        help="on a shared machine: wait so long in all for quiet, and repeat disturbed windows",
    )
    parser.add_argument("--out", type=Path, default=_RESULTS, help="folder for the results")
    options = parser.parse_args(arguments)
    if options.quick:
        options.rounds, options.seconds, options.warmup = 1, 1.5, 0.5
    return options


def main(arguments: list[str] | None = None) -> int:
    return asyncio.run(run(parse_arguments(arguments)))


async def run(options: argparse.Namespace) -> int:
    prompts = make_prompts(_NUM_PROMPTS, options.words)
    load_before = os.getloadavg()
    async with running_mesh(_mesh_options(options)) as mesh:
        num_prompt_tokens = await asyncio.to_thread(ask_once, mesh, prompts[0])
        await asyncio.to_thread(warm_up, mesh, prompts)
        # In a thread, so that the launcher's event loop can go on supervising its processes.
        if options.memory:
            memory = await asyncio.to_thread(measure_memory, mesh, prompts, options.memory)
            text, name, document = memory_markdown(memory), "memory", memory.to_json()
        else:
            prompt = _describe(prompts, num_prompt_tokens)
            found = Run(options.engine, mesh.description, prompt, load_before)
            await asyncio.to_thread(_measure_all, found, mesh, options, prompts, num_prompt_tokens)
            text, name, document = markdown(found), "overhead", found.to_json()
    print(text)
    if not options.quick:
        _write(options, name, document, text)
    return 0


def _mesh_options(options: argparse.Namespace) -> MeshOptions:
    return MeshOptions(options.engine, options.gateways, options.fusion, options.model_dir)


def _describe(prompts: tuple[str, ...], num_tokens: int) -> str:
    return (
        f"{len(prompts)} chat prompts of about {num_tokens} tokens in turn, known to prefill's "
        "cache"
    )


def _measure_all(
    run: Run,
    mesh: RunningMesh,
    options: argparse.Namespace,
    prompts: tuple[str, ...],
    num_prompt_tokens: int,
) -> None:
    scenarios = [s for s in _scenarios(options.engine) if options.only in s.name]
    num_tokens = low_load(run).kind.num_tokens
    bare = BareSpec(
        options.engine, options.model_dir, num_prompt_tokens, num_tokens, options.seconds
    )
    patience = Patience(options.patience)
    progress = Progress(options.rounds * (2 * len(_BASELINES) + 1 + len(scenarios)))
    for number in range(options.rounds):
        _measure_baselines(run, options, prompts, progress)
        progress.step(f"round {number + 1}: the bare engine")
        run.bare.append(measure_bare(bare))
        cells = []
        for scenario in scenarios:
            progress.step(f"round {number + 1}: {scenario.name}")
            cells.append(patience.measure(partial(_measure_one, mesh, scenario, options, prompts)))
        run.rounds.append(cells)
    progress.close()
    run.num_dropped = patience.num_dropped


def ask_once(mesh: RunningMesh, prompt: str) -> int:
    """Send one request before all others; returns the number of its prompt tokens.

    Raises if the request is not answered.
    """
    body = chat_body(prompt, 1, is_stream=False).encode()
    url = f"http://{mesh.host}:{mesh.port}{CHAT_PATH}"
    request = urllib.request.Request(url, body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=_FIRST_ANSWER_S) as response:
        return int(json.load(response)["usage"]["prompt_tokens"])


def warm_up(mesh: RunningMesh, prompts: tuple[str, ...]) -> None:
    """Send each prompt, so that it is in the prefill's cache before the first round."""
    scenario = Scenario(Kind.HANDOVER, _WARMUP_CONNECTIONS)
    spec = scenario.spec(
        mesh.host, mesh.port, prompts, warmup_s=0, duration_s=60, max_requests=2 * len(prompts)
    )
    measure(spec, mesh.processes)


def _scenarios(engine: str) -> tuple[Scenario, ...]:
    return SCENARIOS if engine == "sim" else SCENARIOS_REAL


def _measure_one(
    mesh: RunningMesh, scenario: Scenario, options: argparse.Namespace, prompts: tuple[str, ...]
) -> Cell:
    spec = scenario.spec(
        mesh.host, mesh.port, prompts, warmup_s=options.warmup, duration_s=options.seconds
    )
    return Cell.of(scenario.name, measure(spec, mesh.processes, options.generators))


def _measure_baselines(
    run: Run, options: argparse.Namespace, prompts: tuple[str, ...], progress: Progress
) -> None:
    """Measure the server of canned answers, directly and through the simplest gateway."""

    def cell(scenario: Scenario, port: int) -> Cell:
        spec = scenario.spec(
            "127.0.0.1", port, prompts, warmup_s=0.3, duration_s=min(options.seconds, 1.0)
        )
        return Cell.of(scenario.name, measure(spec, ProcessSet({}), options.generators))

    with canned_server() as direct, passthrough(direct) as passed:
        for scenario in _BASELINES:
            progress.step(f"the generator's ceiling: {scenario.name}")
            run.ceiling.append(cell(scenario, direct))
            progress.step(f"a passthrough: {scenario.name}")
            run.passthrough.append(cell(scenario, passed))


def _write(options: argparse.Namespace, name: str, document: str, text: str) -> None:
    options.out.mkdir(parents=True, exist_ok=True)
    kind = "" if options.engine == "sim" else f"-{options.engine}"
    kind += "-fusion" if options.fusion else ""
    stem = options.out / f"{name}{kind}-{datetime.now(UTC):%Y-%m-%d}"
    stem.with_suffix(".json").write_text(document + "\n")
    stem.with_suffix(".md").write_text(text)
    print(f"written: {stem}.json and .md", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
