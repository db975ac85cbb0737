"""How many tokens of its earlier turns a conversation reuses.

    python -m loadtests.gateway.chats --out loadtests/results/chats-2026-11-24

The report compares a mesh of a prefill and a decode with one of a fusion instance, which does both.
It also compares meshes without host pools (which keep KV in host memory), with host pools, and with
host pools to which a decode also sends the KV of its answers (ADR 0041).

Conversations run turn by turn through the OpenAI endpoint of a mesh of sim instances, as users'
conversations do. Most of each prompt repeats earlier turns. Reused tokens are those that the API
reports as cached. A busy machine does not change their number, but it changes the times to first
token.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import httpx

from loadtests.gateway.report import table
from loadtests.harness.results import describe_machine, describe_versions
from pdmesh.launcher.mesh import Mesh
from pdmesh.launcher.spec import MeshSpec

_WORDS: Final = [
    "the",
    "mesh",
    "moves",
    "a",
    "block",
    "of",
    "what",
    "was",
    "said",
    "to",
    "whoever",
    "goes",
    "on",
    "with",
    "it",
    "now",
]
_ANSWER_TOKENS: Final = 48


@dataclass(frozen=True, slots=True)
class Variant:
    name: str
    num_prefill: int
    pools: str = ""  # empty: no host pools; else whether answers' KV goes to the prefill


VARIANTS: Final = (
    Variant("no pools", 1),
    Variant("pools", 1, "false"),
    Variant("pools, answers go to prefill", 1, "true"),
    Variant("no pools", 0),
)


@dataclass(frozen=True, slots=True)
class Row:
    """A result. Numbers of tokens are means over the turns after the first, and `ttft_ms` is the
    median of these turns.

    `num_names` is the number of entries in the master's index at the end. A block has one entry for
    each instance and tier that holds it.
    """

    roles: str
    variant: str
    prompt_tokens: float
    reused_tokens: float
    computed_tokens: float
    ttft_ms: float
    num_names: int
    index_bytes: int  # of the entries of the index, 16 bytes each


def _spec(variant: Variant) -> MeshSpec:
    pools = {
        "PDMESH_KV_HOST_POOL_BYTES": str(64 << 20),
        "PDMESH_KV_PEER_POOLS": "true",
        "PDMESH_GATEWAY_GIVE_ANSWER_KV": variant.pools,
    }
    return MeshSpec(
        engine="sim",
        num_prefill=variant.num_prefill,
        num_decode=variant.num_prefill,
        num_fusion=1 - variant.num_prefill,
        http_port=0,
        grpc_port=0,
        env={
            "PDMESH_SIM_LAW": "smollm2-cpu",  # if computing took no time, no pool would be used
            "PDMESH_SIM_EOS_PERIOD": "0",
        }
        | (pools if variant.pools else {}),
    )


@dataclass(frozen=True, slots=True)
class Turn:
    prompt_tokens: int
    cached_tokens: int
    ttft_s: float
    answer: str


async def _take_turn(client: httpx.AsyncClient, url: str, messages: list[dict[str, str]]) -> Turn:
    body = {
        "model": "default",
        "messages": messages,
        "max_tokens": _ANSWER_TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    sent, ttft_s, pieces = time.monotonic(), 0.0, list[str]()
    usage: dict[str, Any] = {}
    async with client.stream("POST", f"{url}/v1/chat/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            usage = event.get("usage") or usage
            piece = "".join(choice["delta"].get("content") or "" for choice in event["choices"])
            if piece and not ttft_s:
                ttft_s = time.monotonic() - sent
            pieces.append(piece)
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return Turn(usage["prompt_tokens"], cached, ttft_s, "".join(pieces))


async def _converse(
    client: httpx.AsyncClient, url: str, rng: random.Random, num_turns: int
) -> list[Turn]:
    messages = [{"role": "system", "content": "You carry on. " * 12}]
    turns = []
    for _ in range(num_turns):
        words = rng.choices(_WORDS, k=rng.randrange(4, 24))
        messages.append({"role": "user", "content": " ".join(words)})
        turns.append(await _take_turn(client, url, messages))
        messages.append({"role": "assistant", "content": turns[-1].answer})
    return turns


async def _num_names(client: httpx.AsyncClient, mesh: Mesh) -> int:
    """The number of entries in the master's index.

    The function waits for half a second, so that the index is up to date.
    """
    await asyncio.sleep(0.5)
    answer = await client.get(f"http://{mesh.ops_address('master-scheduler')}/metrics")
    lines = [line for line in answer.text.splitlines() if line.startswith("pdmesh_index_blocks")]
    return round(sum(float(line.rsplit(" ", 1)[1]) for line in lines))


async def _measure(variant: Variant, num_chats: int, num_turns: int) -> Row:
    with tempfile.TemporaryDirectory(prefix="pdmesh-chats-") as directory:
        async with (
            Mesh(_spec(variant), Path(directory)) as mesh,
            httpx.AsyncClient(timeout=30) as client,
        ):
            chats = [
                await _converse(client, mesh.http_url, random.Random(seed), num_turns)
                for seed in range(num_chats)
            ]
            num_names = await _num_names(client, mesh)
    later = [turn for chat in chats for turn in chat[1:]]
    prompt = statistics.fmean(turn.prompt_tokens for turn in later)
    reused = statistics.fmean(turn.cached_tokens for turn in later)
    ttft_ms = 1e3 * statistics.median(turn.ttft_s for turn in later)
    return Row(
        "prefill + decode" if variant.num_prefill else "fusion",
        variant.name,
        prompt,
        reused,
        prompt - reused,
        ttft_ms,
        num_names,
        16 * num_names,
    )


def _markdown(rows: Sequence[Row], num_chats: int, num_turns: int) -> str:
    head = ["roles", "reuse", "prompt", "reused", "computed", "TTFT, ms", "names in the index"]
    body = [
        [
            row.roles,
            row.variant,
            f"{row.prompt_tokens:.1f}",
            f"{row.reused_tokens:.1f}",
            f"{row.computed_tokens:.1f}",
            f"{row.ttft_ms:.1f}",
            f"{row.num_names} ({row.index_bytes} bytes of names)",
        ]
        for row in rows
    ]
    return (
        "# What conversations reuse\n\n"
        f"- `python -m loadtests.gateway.chats`: {num_chats} conversations of {num_turns} turns, "
        "one after another, blocks of 64 tokens,"
        f" answers of {_ANSWER_TOKENS}.\n"
        "- Tokens per turn after the first. With prefill and decode apart, prefill has the "
        "earlier prompts and not the answers, unless they are given to it. Each turn follows the "
        "answer before it at once. TTFT is the median of these turns; computing takes the time of "
        "the law `smollm2-cpu`.\n"
        f"- {describe_machine()}\n\n" + table(head, body) + "\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="write <out>.json and <out>.md")
    parser.add_argument("--chats", type=int, default=12)
    parser.add_argument("--turns", type=int, default=10)
    options = parser.parse_args()
    rows = [asyncio.run(_measure(v, options.chats, options.turns)) for v in VARIANTS]
    text = _markdown(rows, options.chats, options.turns)
    print(text)
    if options.out:
        found = {
            "machine": describe_machine(),
            "versions": describe_versions(),
            "rows": [asdict(row) for row in rows],
        }
        options.out.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
        options.out.with_suffix(".md").write_text(text)


if __name__ == "__main__":
    main()
