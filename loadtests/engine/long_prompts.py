"""How much long prompts slow the decodes beside them on vLLM (S82).

    python -m loadtests.engine.long_prompts      needs vLLM and the prepared model (make model)

Two meshes in turn: a prefill and a decode, and one instance that does both. Streams draw all the
time, by themselves or beside clients that keep long prompts coming, each with an answer of one
token. In the pair the prompts are computed in another process; in one engine they share each step
with the streams, cut into chunks. On a machine where both processes share the cores, the ratio of
the pair includes that.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
from collections.abc import Sequence
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
NUM_STREAMS, NUM_LONG = 4, 1
STREAM_TOKENS, LONG_TOKENS = 400, 1900
QUANTILES: Final = {"p50": 0.5, "p99": 0.99}
BAR: Final = 1.2  # S82: p99 of the time per token, beside a long prompt relative to alone
ENV: Final = {
    "PDMESH_MAX_MODEL_LEN": "2048",
    "PDMESH_PREFILL_NUM_SLOTS": "8",  # a fusion instance reads it, too
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


async def turn(
    mesh: Mesh, rng: random.Random, kind: str, duration_s: float, *, has_long: bool
) -> dict[str, Any]:
    streams = [body(rng, 20, STREAM_TOKENS) for _ in range(NUM_STREAMS)]
    works = [run_load(load(mesh, streams, NUM_STREAMS, duration_s))]
    if has_long:  # so many that no cache knows one that comes again
        long = [body(rng, LONG_TOKENS, 1) for _ in range(100)]
        works.append(run_load(load(mesh, long, NUM_LONG, duration_s)))
    drawn, *others = await asyncio.gather(*works)
    return {
        "kind": kind,
        "has_long": has_long,
        "ms": {name: drawn.gaps.quantile(q) * 1e3 for name, q in QUANTILES.items()},
        "num_long": sum(other.num_requests for other in others),
        "errors": dict(drawn.errors)
        | {f"long: {k}": n for o in others for k, n in o.errors.items()},
    }


async def measured(kind: str, rounds: int, duration_s: float) -> list[dict[str, Any]]:
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
    rng = random.Random(7)
    found = []
    with tempfile.TemporaryDirectory(prefix="pdmesh-long-") as directory:
        async with Mesh(spec, Path(directory)) as mesh:
            for number in range(rounds):
                order = (False, True) if number % 2 else (True, False)
                for has_long in order:
                    found.append(await turn(mesh, rng, kind, duration_s, has_long=has_long))
                    print(found[-1])
    return found


def pairs_of(found: Sequence[dict[str, Any]], kind: str) -> list[tuple[Any, Any]]:
    """Each round's turn beside long prompts, and the one alone."""
    beside, alone = (
        [one for one in found if (one["kind"], one["has_long"]) == (kind, has)]
        for has in (True, False)
    )
    return list(zip(beside, alone, strict=True))


def time_ms(name: str, one: dict[str, Any]) -> float:
    return float(one["ms"][name])


def slower(name: str, pair: tuple[dict[str, Any], dict[str, Any]]) -> float:
    return float(pair[0]["ms"][name] / pair[1]["ms"][name])


def as_markdown(found: Sequence[dict[str, Any]]) -> str:
    ratios = spread_table(
        ["beside long prompts / alone"],
        [(name, partial(slower, name), ".2f") for name in QUANTILES],
        [([kind], pairs_of(found, kind)) for kind in KINDS],
    )
    times = spread_table(
        ["ms between tokens"],
        [(name, partial(time_ms, name), ".1f") for name in QUANTILES],
        [
            ([f"{kind}, {'beside' if has else 'alone'}"], found_)
            for kind in KINDS
            for has in (False, True)
            if (found_ := [o for o in found if (o["kind"], o["has_long"]) == (kind, has)])
        ],
    )
    errors = {name: n for one in found for name, n in one["errors"].items()}
    bar = f"Bar: p99 at most {BAR:.1f} (S82). {f'Errors: {errors}.' if errors else 'No errors.'}"
    return f"{ratios}\n\n{times}\n\n{bar}"


ABOUT: Final = (
    f"SmolLM2-135M in fp32 on vLLM's CPU build: {NUM_STREAMS} streams, alone and beside a client "
    f"that keeps prompts of {LONG_TOKENS} tokens coming. Ratios of a round's two turns, median "
    "(lowest..highest)."
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
