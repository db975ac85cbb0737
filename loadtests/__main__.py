"""The measurements, by name: `python -m loadtests` lists them, `python -m loadtests NAME ...` runs
one (make bench NAME=...).

Arguments after the name go to the measurement. `--help` shows which arguments it takes.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from importlib.util import find_spec

RESULTS = "loadtests/results"


@dataclass(frozen=True, slots=True)
class Bench:
    """A measurement.

    With `record`, it gets `--out` with a file in loadtests/results, unless the caller gives
    another. With `traces`, it plays public request traces if the variable TRACES names their
    folder.
    """

    module: str
    about: str
    needs_vllm: bool = False
    record: bool = False
    traces: bool = False


BENCHES = {
    "replay": Bench(
        "traffic.replay",
        "send a workload to a mesh, and write a page about the answers",
        traces=True,
    ),
    "until-failure": Bench(
        "traffic.until_failure", "more and more users until one answer misses its SLO"
    ),
    "users": Bench("users", "A to 4A users on twelve prefills, on demand and with queues"),
    "chats": Bench("gateway.chats", "conversations: what each turn reuses of earlier turns"),
    "leak": Bench(
        "faults.leak", "100,000 requests with disconnects and kills; nothing may be left (I4)"
    ),
    "cost": Bench(
        "gateway.cost", "the gateway's CPU of this tree and of another revision, in turn"
    ),
    "mesh-cost": Bench(
        "gateway.mesh_cost",
        "the CPU of each process of a mesh, of this tree and of another revision, in turn",
    ),
    "tls-cost": Bench(
        "gateway.tls_cost",
        "what TLS between all processes costs: the CPU of a mesh without and with it, in turn",
    ),
    "instructions": Bench(
        "gateway.instructions",
        "the gateway's instructions, of this tree and of another revision (needs Valgrind)",
    ),
    "long-chats": Bench(
        "gateway.long_chats",
        "what a turn of a chat of 100,000 tokens costs a gateway, and a short request beside it",
        record=True,
    ),
    "prompt-cost": Bench(
        "gateway.prompt_cost",
        "what a long prompt costs a gateway's loop and its other threads, and the rate on 8 cores",
        record=True,
    ),
    "lone-stream": Bench(
        "gateway.lone_stream",
        "p99.9 of a lone stream: alone, beside a steady load and beside a greedy client",
        record=True,
    ),
    "features": Bench(
        "gateway.features",
        "what tools and schemas add, beside vLLM's own server",
        needs_vllm=True,
        record=True,
    ),
    "overhead": Bench("gateway.overhead", "what the mesh adds over the bare engine"),
    "peers": Bench(
        "peers",
        "Dynamo, sglang-router and a passthrough beside ours, in one run (installs them first)",
        record=True,
    ),
    "tiers": Bench(
        "kv.tiers", "time to first token, by the tier that holds a prompt's blocks", needs_vllm=True
    ),
    "retrieval": Bench("kv.retrieval", "how much incoming KV slows running decodes (S52)"),
    "handover": Bench(
        "handover", "what the hand-over of KV costs a client on vLLM", needs_vllm=True
    ),
    "steps": Bench(
        "engine.steps",
        "what asynchronous scheduling is worth: the gap between vLLM's steps, tokens/s, TPOT",
        needs_vllm=True,
        record=True,
    ),
    "priorities": Bench(
        "engine.priorities",
        "what vLLM's order by priority costs where all are equal, and gives the urgent",
        needs_vllm=True,
        record=True,
    ),
    "long-prompts": Bench(
        "engine.long_prompts",
        "how much long prompts slow the decodes beside them on vLLM, in a pair or one engine",
        needs_vllm=True,
        record=True,
    ),
    "loading": Bench(
        "loading",
        "what reading weights once per node is worth, beside a reader in each rank",
        needs_vllm=True,
        record=True,
    ),
    "kv": Bench("kv_bench", "what moving KV costs, block by block and block-free"),
    "speculation": Bench(
        "speculation.proposals",
        "time per proposal and tokens accepted, ours beside vLLM's, by the length of the prompt",
        needs_vllm=True,
        record=True,
    ),
    "speculation-batches": Bench(
        "speculation.batches",
        "whether speculation slows any batch on vLLM (S118)",
        needs_vllm=True,
        record=True,
    ),
    "recovery": Bench("faults.recovery", "how long each step of replacing an instance takes"),
    "plan": Bench("placement.plan", "the cost of one placement decision, by the number of workers"),
    "index": Bench("placement.index", "match time and memory of the index, by blocks and workers"),
    "scale": Bench(
        "placement.scale",
        "decisions, the index and the virtual clock at up to 10,000 instances",
        record=True,
    ),
    "shortlist": Bench(
        "placement.scale.warm",
        "what a shortlist costs in TTFT and reuse on warm caches, simulated",
        record=True,
    ),
    "staleness": Bench(
        "placement.staleness", "how old the master's knowledge is, with 10 to 1,000 instances"
    ),
    "compare": Bench(
        "sim.compare", "placement policies side by side on a virtual clock", traces=True
    ),
    "session-hints": Bench(
        "placement.session_hints",
        "what it is worth that agents' clients say when they pause and when they are done",
        record=True,
    ),
    "placement-generalises": Bench(
        "placement.generalises",
        "whether placement is good on families of requests that did not choose its constants",
        record=True,
        traces=True,
    ),
    "predictor": Bench(
        "placement.predictor",
        "how well a mesh of vLLM predicts the times of prompts that it did not learn from",
        needs_vllm=True,
        record=True,
        traces=True,
    ),
    "compare-mesh": Bench(
        "placement.compare",
        "placement policies side by side on real meshes of sim instances",
        traces=True,
    ),
    "ratio": Bench(
        "sim.ratio", "whether formula (1) and the loop find the best ratio", record=True
    ),
    "sizing": Bench(
        "sizing", "whether the plans of `pdmesh plan` hold on the virtual mesh", record=True
    ),
    "day": Bench("day", "a day of tides, an upgrade and faults on a mesh, in minutes", record=True),
    "simulate-day": Bench(
        "sim.day", "such a day of two scenarios, on a virtual clock", record=True
    ),
}
_RECORDS = {"simulate-day": "day-simulated", "placement-generalises": "placement"}


def arguments(name: str, given: Sequence[str], traces: str, today: date) -> list[str]:
    """The arguments for a measurement: default traces and record file, then the `given` ones."""
    bench, own = BENCHES[name], list[str]()
    if bench.traces and traces:
        own += ["--traces", traces]
    if bench.record:
        own += ["--out", f"{RESULTS}/{_RECORDS.get(name, name)}-{today}"]
    return [*own, *given]


def listing() -> str:
    width = max(map(len, BENCHES))
    return "\n".join(
        f"  {name:<{width}}  {bench.about}{' (needs vLLM)' if bench.needs_vllm else ''}"
        for name, bench in BENCHES.items()
    )


def main() -> int:
    name, given = (sys.argv[1] if len(sys.argv) > 1 else ""), sys.argv[2:]
    if name not in BENCHES:
        print(f"make bench NAME=... ARGS=..., or python -m loadtests NAME ...\n{listing()}")
        if name and name not in ("-h", "--help"):
            print(f"there is no measurement {name!r}", file=sys.stderr)
        return int(name not in ("", "-h", "--help")) * 2
    if BENCHES[name].needs_vllm and find_spec("vllm") is None:
        print(f"{name} needs vLLM and the model: make setup-vllm model", file=sys.stderr)
        return 2
    module = f"loadtests.{BENCHES[name].module}"
    traces = os.environ.get("TRACES", "")
    sys.argv = [module, *arguments(name, given, traces, datetime.now(UTC).date())]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
