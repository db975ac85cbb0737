"""Do retrievals slow running decodes? Time per token of long streams at one decode, without and with KV coming in beside them (S52).

    python -m loadtests.retrieval --out loadtests/results/retrieval-DATE

One prefill, one decode on the sim engine, steps of 20 ms (the demo law), KV as heavy as a small model's (8 layers of 2 KiB per token).
The streams draw all the time; the others ask for two tokens each after long prompts, so that the decode does little but retrieve for them.
Rounds alternate, so that both see the same machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from loadtests.client import LoadResult, LoadSpec, run_load
from loadtests.leak import gauges
from loadtests.results import spread_table, write
from pdmesh.launcher.mesh import Mesh
from pdmesh.launcher.spec import MeshSpec

_NUM_STREAMS, _NUM_OTHERS = 8, 6
_QUANTILES: Final = ("p50", "p90", "p99")
_PROMPT_TOKENS: Final = 1000
_ENV: Final = {
    "PDMESH_SIM_LAW": "demo",
    "PDMESH_SIM_EOS_PERIOD": "0",
    "PDMESH_SIM_NUM_LAYERS": "8",
    "PDMESH_SIM_TOKEN_BYTES": "2048",
    "PDMESH_PREFILL_NUM_SLOTS": "16",
    "PDMESH_DECODE_NUM_SLOTS": "16",
    "PDMESH_LOG_LEVEL": "warning",
}


def _body(rng: random.Random, num_prompt: int, max_tokens: int) -> str:
    body = {
        "model": "default",
        "prompt": [rng.randrange(40, 120) for _ in range(num_prompt)],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return json.dumps(body)


def _spec(mesh: Mesh, bodies: Sequence[str], concurrency: int, duration_s: float) -> LoadSpec:
    parts = urlsplit(mesh.http_url)
    assert parts.hostname is not None
    assert parts.port is not None
    return LoadSpec(
        host=parts.hostname,
        port=parts.port,
        path="/v1/completions",
        bodies=tuple(bodies),
        concurrency=concurrency,
        warmup_s=2.0,
        duration_s=duration_s,
    )


def _gaps_ms(result: LoadResult) -> dict[str, float]:
    return {f"p{int(q * 100)}": round(result.gaps.quantile(q) * 1e3, 2) for q in (0.5, 0.9, 0.99)}


def _pulled_bytes(mesh: Mesh) -> float:
    shown = gauges(mesh, "decode-0")
    return sum(v for n, v in shown.items() if n.startswith("pdmesh_kv_transfer_bytes"))


async def _round(
    mesh: Mesh, rng: random.Random, duration_s: float, *, busy: bool
) -> dict[str, Any]:
    long = [_body(rng, 20, 4000 // _NUM_STREAMS) for _ in range(_NUM_STREAMS)]
    short = [_body(rng, _PROMPT_TOKENS, 2) for _ in range(64)]
    before = _pulled_bytes(mesh)
    works = [run_load(_spec(mesh, long, _NUM_STREAMS, duration_s))]
    if busy:
        works.append(run_load(_spec(mesh, short, _NUM_OTHERS, duration_s)))
    streams, *others = await asyncio.gather(*works)
    errors = dict(streams.errors) | {f"others: {k}": v for o in others for k, v in o.errors.items()}
    return {
        "with_retrievals": busy,
        "time_per_token_ms": _gaps_ms(streams),
        "num_retrieved": sum(o.num_requests for o in others),
        "mib_pulled": round((_pulled_bytes(mesh) - before) / 2**20, 1),
        "errors": errors,
    }


async def _main(arguments: argparse.Namespace) -> int:
    spec = MeshSpec(engine="sim", http_port=0, grpc_port=0, start_timeout_s=120, env=_ENV)
    rng = random.Random(7)
    with tempfile.TemporaryDirectory(prefix="pdmesh-retrieval-") as directory:
        async with Mesh(spec, Path(directory)) as mesh:
            rounds = [
                await _round(mesh, rng, arguments.duration_s, busy=bool(n % 2))
                for n in range(2 * arguments.rounds)
            ]

    text = as_markdown(rounds)
    print(text)
    if arguments.out:
        about = (
            f"Time between two tokens of {_NUM_STREAMS} long streams at one decode, without and with {_NUM_OTHERS} clients that keep prompts of "
            f"{_PROMPT_TOKENS} tokens coming to it beside them, in turns of {arguments.duration_s:.0f} s. Median over the rounds (lowest..highest)."
        )
        write(
            arguments.out,
            "loadtests.retrieval",
            "Decode steps and KV that comes in beside them",
            about,
            text,
            rounds=rounds,
        )
    return 0


def as_markdown(rounds: Sequence[dict[str, Any]]) -> str:
    """Times with and without, and what the difference is between neighbours."""
    calm = [r for r in rounds if not r["with_retrievals"]]
    busy = [r for r in rounds if r["with_retrievals"]]

    def slower(quantile: str) -> Callable[[tuple[dict[str, Any], dict[str, Any]]], float]:
        return lambda pair: (
            pair[1]["time_per_token_ms"][quantile] / pair[0]["time_per_token_ms"][quantile] - 1
        )

    def time_ms(quantile: str) -> Callable[[dict[str, Any]], float]:
        return lambda r: float(r["time_per_token_ms"][quantile])

    times = spread_table(
        ["ms between tokens"],
        [(q, time_ms(q), ".2f") for q in _QUANTILES],
        [(["without"], calm), (["with retrievals"], busy)],
    )
    shares = spread_table(
        [""],
        [(q, slower(q), "+.1%") for q in _QUANTILES],
        [(["slower with retrievals"], list(zip(calm, busy, strict=True)))],
    )
    pulled = ", ".join(f"{r['num_retrieved']} ({r['mib_pulled']:.0f} MiB)" for r in busy)
    errors = {name: n for r in rounds for name, n in r["errors"].items()}
    said = f"Errors: {errors}." if errors else "No errors."
    return f"{times}\n\n{shares}\n\nPrompts retrieved in each round: {pulled}. {said}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--duration-s", type=float, default=8.0)
    parser.add_argument("--out", type=Path, help="write this .md and .json")
    return asyncio.run(_main(parser.parse_args(argv)))


if __name__ == "__main__":
    raise SystemExit(main())
