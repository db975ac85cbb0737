"""What a conversation reuses of its earlier turns: only full blocks, or also the partial block that
it continues (S103, S104), and with prefill and decode apart the answers, too (ADR 0041).

    python -m loadtests.gateway.chats --out loadtests/results/chats-2026-11-21

Conversations run turn by turn through the OpenAI endpoint of a mesh of sim instances, as those of
users do: most of each prompt repeats earlier turns. Reused tokens are those that the API reports as
cached. The results are counts, not times, so a busy machine does not change them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

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
    start: int
    step: int
    num_prefill: int
    num_fusion: int
    pools: str = ""  # with host pools and peers; and then whether answers are given to prefill


VARIANTS: Final = (
    *(
        Variant(name, start, step, num_prefill, 1 - num_prefill)
        for num_prefill in (1, 0)
        for name, start, step in (
            ("whole blocks", 208, 0),
            ("tails, 208/4", 208, 4),
            ("tails, 16/4", 16, 4),
        )
    ),
    Variant("whole blocks, pools", 208, 0, 1, 0, "false"),
    Variant("whole blocks, pools, answers", 208, 0, 1, 0, "true"),
)


@dataclass(frozen=True, slots=True)
class Row:
    """Tokens are means per turn after the first; names are those in the index at the end."""

    roles: str
    variant: str
    prompt_tokens: float
    reused_tokens: float
    computed_tokens: float
    num_names: int
    index_bytes: int  # of names, 16 bytes each


def _spec(variant: Variant) -> MeshSpec:
    pools = {
        "PDMESH_SIM_LAW": "smollm2-cpu",  # computing must cost something, or no pool is used
        "PDMESH_KV_HOST_POOL_BYTES": str(64 << 20),
        "PDMESH_KV_PEER_POOLS": "true",
        "PDMESH_GATEWAY_GIVE_ANSWER_KV": variant.pools,
    }
    return MeshSpec(
        engine="sim",
        num_prefill=variant.num_prefill,
        num_decode=variant.num_prefill,
        num_fusion=variant.num_fusion,
        http_port=0,
        grpc_port=0,
        env={
            "PDMESH_SIM_LAW": "zero",
            "PDMESH_SIM_EOS_PERIOD": "0",
            "PDMESH_KV_TAIL_START": str(variant.start),
            "PDMESH_KV_TAIL_STEP": str(variant.step),
        }
        | (pools if variant.pools else {}),
    )


async def _converse(
    client: httpx.AsyncClient, url: str, rng: random.Random, num_turns: int
) -> list[tuple[int, int]]:
    """(prompt tokens, cached tokens) of each turn."""
    messages = [{"role": "system", "content": "You carry on. " * 12}]
    found = []
    for _ in range(num_turns):
        words = rng.choices(_WORDS, k=rng.randrange(4, 24))
        messages.append({"role": "user", "content": " ".join(words)})
        body = {"model": "default", "messages": messages, "max_tokens": _ANSWER_TOKENS}
        answer = await client.post(f"{url}/v1/chat/completions", json={**body, "temperature": 0})
        answer.raise_for_status()
        whole = answer.json()
        messages.append(whole["choices"][0]["message"])
        usage = whole["usage"]
        found.append((usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]))
    return found


async def _num_names(client: httpx.AsyncClient, mesh: Mesh) -> int:
    """How many names the master's index holds once it is up to date."""
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
    prompt, reused = (sum(turn[i] for turn in later) / len(later) for i in (0, 1))
    roles = "prefill + decode" if variant.num_prefill else "fusion"
    return Row(roles, variant.name, prompt, reused, prompt - reused, num_names, 16 * num_names)


def _markdown(rows: Sequence[Row], num_chats: int, num_turns: int) -> str:
    head = ["roles", "reuse", "prompt", "reused", "computed", "names in the index"]
    body = [
        [
            row.roles,
            row.variant,
            f"{row.prompt_tokens:.1f}",
            f"{row.reused_tokens:.1f}",
            f"{row.computed_tokens:.1f}",
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
        "earlier prompts and not the answers, unless they are given to it. The variants with "
        "pools compute at the speed of the law `smollm2-cpu`, the others at no cost. Each turn "
        "follows the answer before it at once.\n"
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
