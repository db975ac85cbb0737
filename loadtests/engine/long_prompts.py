"""How much long prompts slow the decodes beside them on vLLM (S82).

    python -m loadtests.engine.long_prompts      needs vLLM and the prepared model (make model)

Two kinds of mesh run one after the other: "pair" is a prefill and a decode, and "one engine" is an
instance that does both phases. Streams draw tokens all the time, alone or beside a client that
sends long prompts without a pause. Each long prompt has an answer of one token. In the pair,
another process computes the long prompts. In one engine, the long prompts are cut into chunks, and
each step computes a chunk together with the streams' tokens.

Two processes on one machine also share its caches and memory bandwidth. To measure this effect
alone, in a third turn the streams run at one pair while another pair computes the long prompts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from loadtests.harness.client import LoadSpec, run_load
from loadtests.harness.generator import ROOT
from loadtests.harness.results import spread_table, write
from pdmesh.launcher.mesh import Mesh
from pdmesh.launcher.spec import MeshSpec

MODEL: Final = ROOT / ".cache/models/SmolLM2-135M-Instruct"
KINDS: Final = {"pair": (1, 1, 0), "one engine": (0, 0, 1)}  # prefills, decodes, fusions
# The kinds of turns: without long prompts, with them at the same mesh, with them at another mesh.
ALONE, BESIDE, ELSEWHERE = "alone", "beside", "beside, elsewhere"
TURNS: Final = {"pair": (ALONE, BESIDE, ELSEWHERE), "one engine": (ALONE, BESIDE)}
NUM_STREAMS, NUM_LONG = 4, 1
STREAM_TOKENS, LONG_TOKENS = 400, 1900
LEAST_LONG: Final = 3  # a turn lasts at least as long as this many long prompts take alone
MOST_S: Final = 120.0  # the longest time for a lone long prompt
QUANTILES: Final = {"p50": 0.5, "p99": 0.99}
BAR: Final = 1.2  # S82: p99 of the time per token, beside a long prompt relative to alone
ENV: Final = {
    "PDMESH_MAX_MODEL_LEN": "2048",
    "PDMESH_PREFILL_NUM_SLOTS": "8",  # also the slots of a fusion instance
    "PDMESH_DECODE_NUM_SLOTS": "8",
    "PDMESH_GATEWAY_TTFT_S": "300",
    "PDMESH_ENGINE_HUNG_S": "300",
    "PDMESH_LOG_LEVEL": "warning",
}


def body(rng: random.Random, num_prompt: int, max_tokens: int) -> str:
    prompt = rng.choices(range(1000, 40000), k=num_prompt)
    asked = {"model": "default", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    told = {"stream": True, "ignore_eos": True, "stream_options": {"include_usage": True}}
    return json.dumps(asked | told)


def load(mesh: Mesh, bodies: Sequence[str], concurrency: int, duration_s: float) -> LoadSpec:
    return LoadSpec.of_url(
        mesh.http_url,
        "/v1/completions",
        bodies,
        concurrency=concurrency,
        warmup_s=5.0,
        duration_s=duration_s,
    )


async def seconds_of_a_long_prompt(mesh: Mesh, rng: random.Random, at_most_s: float) -> float:
    one = load(mesh, [body(rng, LONG_TOKENS, 1)], NUM_LONG, at_most_s)
    return (await run_load(replace(one, warmup_s=0.0, max_requests=1))).duration_s


async def turn(
    mesh: Mesh, prompts_to: Mesh | None, rng: random.Random, duration_s: float
) -> dict[str, Any]:
    streams = [body(rng, 20, STREAM_TOKENS) for _ in range(NUM_STREAMS)]
    works = [run_load(load(mesh, streams, NUM_STREAMS, duration_s))]
    if prompts_to:  # so many prompts that each has left the cache when it comes again
        long = [body(rng, LONG_TOKENS, 1) for _ in range(100)]
        works.append(run_load(load(prompts_to, long, NUM_LONG, duration_s)))
    drawn, *others = await asyncio.gather(*works)
    return {
        "ms": {name: drawn.gaps.quantile(q) * 1e3 for name, q in QUANTILES.items()},
        "num_long": sum(other.num_requests for other in others),
        "errors": dict(drawn.errors)
        | {f"long: {k}": n for o in others for k, n in o.errors.items()},
    }


def mesh_of(kind: str, directory: Path) -> Mesh:
    num_prefill, num_decode, num_fusion = KINDS[kind]
    spec = MeshSpec(
        engine="vllm",
        num_prefill=num_prefill,
        num_decode=num_decode,
        num_fusion=num_fusion,
        http_port=0,
        grpc_port=0,
        model_dir=MODEL,
        start_timeout_s=300,
        env=ENV,
    )
    return Mesh(spec, directory)


async def measured(kind: str, rounds: int, duration_s: float) -> list[dict[str, Any]]:
    """Measure all turns on one kind of mesh.

    On a slow machine, turns last longer than `duration_s`, so that each has several long prompts.
    """
    rng = random.Random(7)
    found = []
    async with AsyncExitStack() as stack:
        meshes: dict[str, Mesh] = {}
        for where in {BESIDE, ELSEWHERE}.intersection(TURNS[kind]):
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="pdmesh-long-"))
            meshes[where] = await stack.enter_async_context(mesh_of(kind, Path(folder)))
        long_s = await seconds_of_a_long_prompt(meshes[BESIDE], rng, MOST_S)
        duration_s = max(duration_s, LEAST_LONG * long_s)
        for number in range(rounds):
            for where in TURNS[kind][:: 1 if number % 2 else -1]:
                one = await turn(meshes[BESIDE], meshes.get(where), rng, duration_s)
                found.append({"kind": kind, "where": where} | one)
                print(found[-1])
    return found


def turns_of(found: Sequence[dict[str, Any]], kind: str, where: str) -> list[dict[str, Any]]:
    return [one for one in found if (one["kind"], one["where"]) == (kind, where)]


def pairs_of(
    found: Sequence[dict[str, Any]], kind: str, where: str, over: str
) -> list[tuple[Any, Any]]:
    """Pairs of turns of the same round: the turn `where`, and the turn `over` as its baseline."""
    return list(zip(turns_of(found, kind, where), turns_of(found, kind, over), strict=True))


def time_ms(name: str, one: dict[str, Any]) -> float:
    return float(one["ms"][name])


def slower(name: str, pair: tuple[dict[str, Any], dict[str, Any]]) -> float:
    return float(pair[0]["ms"][name] / pair[1]["ms"][name])


def as_markdown(found: Sequence[dict[str, Any]]) -> str:
    compared = [
        ("pair", BESIDE, ALONE),
        ("pair", ELSEWHERE, ALONE),
        ("pair", BESIDE, ELSEWHERE),
        ("one engine", BESIDE, ALONE),
    ]
    ratios = spread_table(
        ["ratio of times"],
        [(name, partial(slower, name), ".2f") for name in QUANTILES],
        [
            ([f"{kind}: {where} / {over}"], pairs_of(found, kind, where, over))
            for kind, where, over in compared
        ],
    )
    times = spread_table(
        ["ms between tokens"],
        [(name, partial(time_ms, name), ".1f") for name in QUANTILES],
        [
            ([f"{kind}: {where}"], turns_of(found, kind, where))
            for kind, places in TURNS.items()
            for where in places
        ],
    )
    errors = {name: n for one in found for name, n in one["errors"].items()}
    bar = (
        f"Bar: p99 of the pair, {BESIDE} / {ALONE}, at most {BAR:.1f} (S82). "
        f"{f'Errors: {errors}.' if errors else 'No errors.'}"
    )
    return f"{ratios}\n\n{times}\n\n{bar}"


ABOUT: Final = (
    f"SmolLM2-135M in fp32 on vLLM's CPU build: {NUM_STREAMS} streams alone, beside a client that "
    f"keeps prompts of {LONG_TOKENS} tokens coming, and beside the same at another pair on this "
    "machine. Ratios of a round's turns, median (lowest..highest)."
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--duration-s", type=float, default=30.0)
    parser.add_argument("--out", type=Path, help="writes OUT.md and OUT.json")
    args = parser.parse_args()
    found = [
        one for kind in KINDS for one in asyncio.run(measured(kind, args.rounds, args.duration_s))
    ]
    text = as_markdown(found)
    print(text)
    if args.out:
        title = "Long prompts beside running decodes on vLLM"
        write(args.out, "loadtests.engine.long_prompts", title, ABOUT, text, turns=found)


if __name__ == "__main__":
    main()
