"""Whether retrievals slow running decodes.

A retrieval is a decode's transfer of a prompt's KV. The benchmark measures the time between tokens
of long streams at one decode, with and without KV that comes in at the same time (S52).

    python -m loadtests.kv.retrieval --out loadtests/results/retrieval-DATE

One prefill and one decode run on the sim engine. Steps take 20 ms (the demo law), and KV is as
large as a small model's (8 layers of 2 KiB per token). Streams draw tokens all the time. There are
three kinds of round:

- only the streams;
- also clients that ask for one token after long prompts, which the prefill answers by itself;
- the same clients, but they ask for two tokens. So the decode retrieves each prompt's KV and does
  little else for it.

The last two kinds compute nearly the same and differ in the hand-over. The bar compares the third
kind with the first, so it includes the effect of the prefill on the same cores. The kinds
alternate, so that all see the same machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from loadtests.faults.leak import gauges
from loadtests.harness.client import LoadResult, LoadSpec, run_load
from loadtests.harness.results import spread_table, write
from pdmesh.launcher.mesh import Mesh
from pdmesh.launcher.spec import MeshSpec

_NUM_STREAMS, _NUM_OTHERS = 8, 6
_QUANTILES: Final = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
_SHOWN: Final = ("mean", *_QUANTILES)
_BAR: Final = 1.05  # S52: mean time per token with pulls, divided by that with only streams
# The kinds of round, and how many tokens the other clients ask for. With 0, there are no such
# clients.
_ALONE, _PREFILLED, _PULLED = "alone", "prefilled", "pulled"
_KINDS: Final = {_ALONE: 0, _PREFILLED: 1, _PULLED: 2}
_LABELS: Final = {
    _ALONE: "streams alone",
    _PREFILLED: "prompts beside them, nothing pulled",
    _PULLED: "prompts beside them, each pulled",
}
_PROMPT_TOKENS: Final = 1000
_NUM_PROMPTS: Final = 500  # so many prompts that each has left the cache when it comes again
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
    return LoadSpec.of_url(
        mesh.http_url,
        "/v1/completions",
        bodies,
        concurrency=concurrency,
        warmup_s=2.0,
        duration_s=duration_s,
    )


def _gaps_ms(result: LoadResult) -> dict[str, float]:
    gaps = {name: result.gaps.quantile(q) for name, q in _QUANTILES.items()}
    return {name: round(s * 1e3, 2) for name, s in {"mean": result.gaps.mean(), **gaps}.items()}


def _pulled_bytes(mesh: Mesh) -> float:
    shown = gauges(mesh, "decode-0")
    return sum(v for n, v in shown.items() if n.startswith("pdmesh_kv_transfer_bytes"))


async def _round(mesh: Mesh, rng: random.Random, duration_s: float, kind: str) -> dict[str, Any]:
    long = [_body(rng, 20, 4000 // _NUM_STREAMS) for _ in range(_NUM_STREAMS)]
    short = [_body(rng, _PROMPT_TOKENS, _KINDS[kind]) for _ in range(_NUM_PROMPTS)]
    before = _pulled_bytes(mesh)
    works = [run_load(_spec(mesh, long, _NUM_STREAMS, duration_s))]
    if _KINDS[kind]:
        works.append(run_load(_spec(mesh, short, _NUM_OTHERS, duration_s)))
    streams, *others = await asyncio.gather(*works)
    errors = dict(streams.errors) | {f"others: {k}": v for o in others for k, v in o.errors.items()}
    return {
        "kind": kind,
        "time_per_token_ms": _gaps_ms(streams),
        "num_prompts": sum(o.num_requests for o in others),
        "mib_pulled": round((_pulled_bytes(mesh) - before) / 2**20, 1),
        "errors": errors,
    }


async def _main(arguments: argparse.Namespace) -> int:
    spec = MeshSpec(engine="sim", http_port=0, grpc_port=0, start_timeout_s=120, env=_ENV)
    rng = random.Random(7)
    with tempfile.TemporaryDirectory(prefix="pdmesh-retrieval-") as directory:
        async with Mesh(spec, Path(directory)) as mesh:
            rounds = [
                await _round(mesh, rng, arguments.duration_s, kind)
                for _ in range(arguments.rounds)
                for kind in _KINDS
            ]

    text = as_markdown(rounds)
    print(text)
    if arguments.out:
        about = (
            f"Time between two tokens of {_NUM_STREAMS} long streams at one decode, in turns of "
            f"{arguments.duration_s:.0f} s: alone; beside {_NUM_OTHERS} clients "
            f"that keep prompts of {_PROMPT_TOKENS} tokens coming and ask for one token each, "
            "which prefill answers; and beside the same who ask for two, so that the "
            "decode pulls. Median over the rounds (lowest..highest), ratios of neighbours."
        )
        write(
            arguments.out,
            "loadtests.kv.retrieval",
            "Decode steps and KV that comes in beside them",
            about,
            text,
            rounds=rounds,
        )
    return 0


def as_markdown(rounds: Sequence[dict[str, Any]]) -> str:
    """A table of the times of each kind of round, and how much slower its streams are."""
    by_kind = {kind: [r for r in rounds if r["kind"] == kind] for kind in _KINDS}
    times = spread_table(
        ["ms between tokens"],
        [
            *((name, partial(_time_ms, name), ".2f") for name in _SHOWN),
            ("prompts", lambda r: float(r["num_prompts"]), ".0f"),
            ("MiB pulled", lambda r: float(r["mib_pulled"]), ".0f"),
        ],
        [([_LABELS[kind]], found) for kind, found in by_kind.items()],
    )
    pairs = {
        "pulled / not pulled": list(zip(by_kind[_PULLED], by_kind[_PREFILLED], strict=True)),
        "pulled / streams alone": list(zip(by_kind[_PULLED], by_kind[_ALONE], strict=True)),
        "not pulled / streams alone": list(zip(by_kind[_PREFILLED], by_kind[_ALONE], strict=True)),
    }
    ratios = spread_table(
        ["ratio"],
        [(name, partial(_slower, name), ".2f") for name in _SHOWN],
        [([name], found) for name, found in pairs.items()],
    )
    errors = {name: n for r in rounds for name, n in r["errors"].items()}
    said = f"Errors: {errors}." if errors else "No errors."
    return f"{times}\n\n{ratios}\n\n{_verdict(pairs['pulled / streams alone'])} {said}"


def _time_ms(name: str, one: dict[str, Any]) -> float:
    return float(one["time_per_token_ms"][name])


def _slower(name: str, pair: tuple[dict[str, Any], dict[str, Any]]) -> float:
    return _time_ms(name, pair[0]) / _time_ms(name, pair[1])


def _verdict(pairs: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> str:
    ratio = statistics.median(_slower("mean", pair) for pair in pairs)
    found = "**unmet**" if ratio > _BAR else "met"
    return f"Bar: pulled / streams alone at most {_BAR:.2f} on average: {ratio:.2f}, {found}."


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5, help="of all three kinds (5)")
    parser.add_argument("--duration-s", type=float, default=8.0)
    parser.add_argument("--out", type=Path, help="write this .md and .json")
    return asyncio.run(_main(parser.parse_args(argv)))


if __name__ == "__main__":
    raise SystemExit(main())
