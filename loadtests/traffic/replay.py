"""Send a workload to a mesh in an open loop and write a report: JSON and one page of plots.

    make bench NAME=replay ARGS="--workload mooncake --traces FOLDER --lengths 0.02 --time 0.05"
    make bench NAME=replay ARGS="--workload scenarios --rate 10"  # six, which share prefixes
    make bench NAME=replay ARGS="--workload services --rate 12"   # two services, twelve scenarios
    make bench NAME=replay ARGS="--workload chats --url http://127.0.0.1:8000"

Without --url, the program starts its own mesh, with --prefill and --decode instances of --engine.
Sim engines compute by --law. `azure` combines three scenarios (code, conversation, and Mooncake's)
on one clock, since none of the traces has a scenario field.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import sys
import tempfile
import urllib.request
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from loadtests.harness.generator import canned_server
from loadtests.harness.processes import ProcessSet, cpu_between
from loadtests.harness.progress import Progress
from loadtests.traffic import services, workloads
from loadtests.traffic.loops import (
    Answer,
    Target,
    closed_loop,
    open_loop,
)
from loadtests.traffic.report import Run, Slo, write
from loadtests.traffic.workloads import Arrival
from pdmesh.launcher.mesh import Mesh
from pdmesh.launcher.spec import MeshSpec

DECODE_SLOTS: Final = 64
TTFT_S: Final = 10.0  # after this wait a request is refused; the gateway's own default
_MOONCAKE: Final = "mooncake_conversation_trace.jsonl"
_AZURE: Final = ("AzureLLMInferenceTrace_code.csv", "AzureLLMInferenceTrace_conv.csv")
_STEPS: Final = 20  # steps of the progress bar
_REJECTIONS: Final = re.compile(
    r'^pdmesh_request_rejections(?:_ratio)?_bucket\{.*le="([0-9]+|\+Inf)(?:\.0)?".*\} ([0-9.e+]+)',
    re.MULTILINE,
)
_COUNTED: Final = re.compile(
    r'^pdmesh_admissions_total\{.*outcome="accepted".*\} ([0-9.e+]+)', re.MULTILINE
)
_PREDICTED: Final = re.compile(
    r'^pdmesh_plan_prediction_error(?:_ratio)?\{.*kind="([^"]*)".*\} ([0-9.e+-]+)', re.MULTILINE
)


def _mooncake(options: argparse.Namespace) -> list[Arrival]:
    jitter = options.seed if options.jitter else None
    arrivals = workloads.mooncake(
        workloads.trace_file(options.traces, _MOONCAKE), jitter_seed=jitter
    )
    return workloads.scaled(arrivals[: options.first], time=options.time, lengths=options.lengths)


def _azure(options: argparse.Namespace) -> list[Arrival]:
    paths = [workloads.trace_file(options.traces, name) for name in (*_AZURE, _MOONCAKE)]
    code = workloads.azure(paths[0], "code")
    conv = workloads.azure(paths[1], "conversation")
    chat = [replace(a, scenario="mooncake") for a in workloads.mooncake(paths[2])]
    merged = sorted([*code, *conv, *chat], key=lambda a: a.at_s)[: options.first]
    return workloads.scaled(merged, time=options.time, lengths=options.lengths)


def _scenarios(options: argparse.Namespace) -> list[Arrival]:
    return workloads.prefixed_scenarios(
        random.Random(options.seed),
        num_scenarios=6,
        num_requests=options.first // 6,
        prefix_tokens=512,
        num_tokens=640,
        num_output_tokens=16,
        rate_per_s=options.rate,
    )


def _chats(options: argparse.Namespace) -> list[Arrival]:
    return workloads.chats(
        random.Random(options.seed),
        num_chats=options.first // 5,
        num_turns=5,
        first_tokens=256,
        turn_tokens=64,
        num_output_tokens=32,
        rate_per_s=options.rate / 5,
        think_s=4.0,
    )


def _services(options: argparse.Namespace) -> list[Arrival]:
    return services.arrivals(random.Random(options.seed), options.first, options.rate)


def _short_chats(options: argparse.Namespace) -> list[Arrival]:
    return _rtp(options, workloads.short_chats)


def _long_prompts(options: argparse.Namespace) -> list[Arrival]:
    return _rtp(options, workloads.long_prompts)


def _rtp(options: argparse.Namespace, make: Callable[..., list[Arrival]]) -> list[Arrival]:
    """The arrivals that `make` generates. Each scenario has a dozen requests."""
    arrivals = make(
        random.Random(options.seed),
        num_scenarios=options.first // 12,
        num_requests=12,
        rate_per_s=options.rate,
    )
    return workloads.scaled(arrivals, lengths=options.lengths)


WORKLOADS: Final[dict[str, Callable[[argparse.Namespace], list[Arrival]]]] = {
    "mooncake": _mooncake,
    "azure": _azure,
    "scenarios": _scenarios,
    "services": _services,
    "chats": _chats,
    "short-chats": _short_chats,
    "long-prompts": _long_prompts,
}


@dataclass(frozen=True, slots=True)
class Played(Run):
    """A run, with the CPU that all the mesh's processes used during the load.

    `cpu_s` is 0 for a mesh that this program did not start.
    """

    cpu_s: float = 0.0


def _spec(options: argparse.Namespace) -> MeshSpec:
    settings = {"PREFILL": {"NUM_SLOTS": str(options.slots)}, "DECODE": {}}
    if options.engine == "sim":
        # Both roles must compute the same model to form a pair.
        shared = {"SIM_LAW": options.law, "SIM_EOS_PERIOD": "0"}
        settings["PREFILL"] |= {**shared, "NUM_KV_BLOCKS": str(options.prefill_blocks)}
        settings["DECODE"] |= {**shared, "NUM_SLOTS": str(DECODE_SLOTS)}
    return MeshSpec(
        engine=options.engine,
        model_dir=options.model_dir,
        num_prefill=options.prefill,
        num_decode=options.decode,
        num_gateways=options.gateways,
        http_port=0,
        grpc_port=0,
        service_env={
            **{
                role.lower(): {f"PDMESH_{role}_{key}": value for key, value in own.items()}
                for role, own in settings.items()
            },
            "master-scheduler": {"PDMESH_MASTER_SCHEDULER_POLICY": options.policy},
            "gateway": {"PDMESH_GATEWAY_TTFT_S": str(TTFT_S)},
        },
    )


def _services_spec(options: argparse.Namespace) -> MeshSpec:
    spec = services.mesh_spec(options.law, services.SCENARIOS)
    policy = {"PDMESH_MASTER_SCHEDULER_POLICY": options.policy}
    service_env = {**spec.service_env, "master-scheduler": policy}
    return replace(spec, num_gateways=options.gateways, service_env=service_env)


def _arrivals(options: argparse.Namespace) -> list[Arrival]:
    arrivals = WORKLOADS[options.workload](options)
    if not arrivals:
        raise SystemExit(f"--first {options.first} is too few requests for {options.workload}")
    if options.poisson:
        return workloads.poisson(arrivals, options.poisson, random.Random(options.seed))
    return arrivals


async def run(options: argparse.Namespace) -> Played:
    arrivals = _arrivals(options)
    names_scenario = options.workload == "services"
    if options.url:
        return Played(await _send(_target(options.url, names_scenario), arrivals))
    spec = _services_spec(options) if names_scenario else _spec(options)
    with tempfile.TemporaryDirectory(prefix="pdmesh-replay-") as directory:
        async with Mesh(spec, Path(directory), report=_say) as mesh:
            processes = ProcessSet({name: mesh.pid(name) for name in mesh.names})
            before = processes.costs()
            target = Target.at(mesh.http_url, names_scenario=names_scenario)
            answers = await _send(target, arrivals)
            names = [name for name in mesh.names if name.startswith(("prefill", "decode"))]
            return Played(
                answers,
                {name: _admitted(mesh.ops_address(name)) for name in names},
                _rejections(mesh),
                _prediction_errors(mesh.ops_address("master-scheduler")),
                cpu_s=sum(cpu_between(before, processes.costs()).values()),
            )


def _target(url: str, names_scenario: bool) -> Target:
    try:
        return Target.at(url, names_scenario=names_scenario)
    except ValueError as exc:
        raise SystemExit(f"--url {exc}") from exc


async def _send(target: Target, arrivals: list[Arrival]) -> list[Answer]:
    num_steps, done, num_refused = min(_STEPS, len(arrivals)), 0, 0
    progress = Progress(num_steps)

    def count(answer: Answer) -> None:
        nonlocal done, num_refused
        num_refused += not answer.is_answered
        if done * num_steps // len(arrivals) < (done + 1) * num_steps // len(arrivals):
            progress.step(f"{done + 1} of {len(arrivals)} ended, {num_refused} without an answer")
        done += 1

    answers = await open_loop(target, arrivals, count)
    progress.close()
    return answers


def _rejections(mesh: Mesh) -> dict[str, float]:
    """The number of calls by how often prefills rejected them, over all gateways."""
    found: Counter[str] = Counter()
    for name in mesh.names:
        if name.startswith("gateway"):
            found.update(by_rejections(_metrics(mesh.ops_address(name))))
    return dict(found)


def by_rejections(page: str) -> dict[str, float]:
    """The number of calls by how many prefills rejected them.

    The numbers come from the cumulative buckets of a gateway's histogram.
    """
    found: dict[str, float] = {}
    before, lowest = 0.0, 0
    for bound, value in _REJECTIONS.findall(page):
        if bound == "+Inf":
            name = f"{lowest} or more"
        else:
            name = bound if int(bound) == lowest else f"{lowest}-{bound}"
            lowest = int(bound) + 1
        found[name], before = float(value) - before, float(value)
    return found


def _admitted(ops_address: str) -> float:
    return sum(map(float, _COUNTED.findall(_metrics(ops_address))))


def _prediction_errors(ops_address: str) -> dict[str, float]:
    return {kind: float(error) for kind, error in _PREDICTED.findall(_metrics(ops_address))}


def _metrics(ops_address: str) -> str:
    with urllib.request.urlopen(f"http://{ops_address}/metrics", timeout=5) as page:
        return str(page.read(), "utf-8")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


async def ceiling(num_users: int = 32, duration_s: float = 5.0) -> float:
    """The most requests/s that this generator can send.

    A request has 512 prompt tokens, and its answer 16.
    """
    with canned_server() as port:
        answers = await closed_loop(
            Target("127.0.0.1", port),
            num_users,
            lambda: Arrival(0.0, 512, 16, tuple(workloads.block_name(1, i) for i in range(8))),
            think_s=lambda: 0.0,
            duration_s=duration_s,
        )
    assert all(a.is_answered for a in answers)
    return len(answers) / duration_s


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--workload", choices=WORKLOADS, default="scenarios")
    parser.add_argument("--traces", type=Path, help="folder of the public traces")
    parser.add_argument("--first", type=int, default=300, help="the number of requests")
    parser.add_argument("--time", type=float, default=1.0, help="factor on the trace's times")
    parser.add_argument("--lengths", type=float, default=1.0, help="factor on the trace's lengths")
    parser.add_argument("--jitter", action="store_true", help="spread Mooncake's 3 s ticks")
    parser.add_argument("--rate", type=float, default=10.0, help="requests/s of generated load")
    parser.add_argument(
        "--poisson", type=float, help="requests/s at Poisson times, instead of the trace's times"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--url", help="a mesh that runs already")
    parser.add_argument("--engine", choices=("sim", "vllm"), default="sim")
    parser.add_argument("--model-dir", type=Path, help="model directory, for --engine vllm")
    parser.add_argument("--policy", default="default")
    parser.add_argument("--law", default="smollm2-cpu")
    parser.add_argument("--prefill", type=int, default=4)
    parser.add_argument("--decode", type=int, default=2)
    parser.add_argument("--gateways", type=int, default=1, help="processes that share one port")
    parser.add_argument("--slots", type=int, default=2, help="slots of each prefill")
    parser.add_argument(
        "--prefill-blocks",
        type=int,
        default=0,
        help="KV blocks of each prefill: the size of its cache; 0: room for all slots",
    )
    parser.add_argument("--ttft-slo-s", type=float, default=1.0)
    parser.add_argument("--tpot-slo-s", type=float, default=0.1)
    parser.add_argument("--out", type=Path, help="write OUT.json, OUT.md and OUT.png")
    parser.add_argument(
        "--ceiling", action="store_true", help="measure only what the generator itself can carry"
    )
    return parser


def main() -> None:
    options = parser().parse_args()
    if options.ceiling:
        print(f"the generator alone: {asyncio.run(ceiling()):.0f} requests/s")
        return
    played = asyncio.run(run(options))
    if not any(a.status for a in played.answers):
        raise SystemExit(f"no request got any answer: is there a mesh at {options.url}?")
    if options.out:
        played = replace(played, ceiling_per_s=asyncio.run(ceiling(duration_s=2.0)))
    write(played, Slo(options.ttft_slo_s, options.tpot_slo_s), options.out)


if __name__ == "__main__":
    main()
