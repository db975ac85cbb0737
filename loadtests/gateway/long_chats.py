"""What a turn of a very long chat costs a gateway, with and without kept tokens of earlier turns.

    python -m loadtests long-chats [--tokens 100000] [--grows 1000] [--turns 8]

Two meshes, whose sim instances compute in no time, serve the same chat in turn, with one answer
token in each turn. Only one of the meshes keeps the tokens of earlier turns. Both serve the chat
once before the first measured turn. After each turn, the mesh gets a new chat of the same length.
Short prompts follow one after the other until the new chat is answered.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import httpx

from loadtests.gateway.report import table
from loadtests.harness.generator import ROOT
from loadtests.harness.processes import ProcessSet, cpu_between
from loadtests.harness.progress import Progress
from loadtests.harness.results import write
from pdmesh.launcher.mesh import Mesh
from pdmesh.launcher.spec import MeshSpec

_MODEL: Final = ROOT / ".cache/models/SmolLM2-135M-Instruct"
_KINDS: Final = {"kept": str(64 << 20), "not kept": "0"}  # values of SECTION_CACHE_BYTES
_CHARS_PER_TOKEN: Final = 3.1  # characters per token of this text with SmolLM2's tokenizer
_SHORT: Final = [{"role": "user", "content": "What is the capital of France?"}]
ABOUT: Final = (
    "CPU of the gateway's process for one turn, and the time of short requests before it and beside"
    " a new chat of its length. Each cell: the median over the turns (lowest..highest)."
)
Messages = list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Turn:
    """The result of one turn, in milliseconds.

    `alone_ms` is the slowest short request before the turn. `beside_ms` is the slowest one while a
    new chat of the same length was served.
    """

    kind: str
    num_tokens: int
    gateway_cpu_ms: float
    ttft_ms: float
    alone_ms: float
    beside_ms: float


class Chat:
    """A chat of words that the tokenizer has seen, in a new order."""

    def __init__(self, num_tokens: int, num_grown: int) -> None:
        text = (ROOT / "README.md").read_text() + (ROOT / "docs/architecture.md").read_text()
        self._words, self._rng = text.split(), random.Random(7)
        self._grown = num_grown
        self.messages: Messages = []
        for _ in range(num_tokens // num_grown):
            self.grow()

    def grow(self) -> None:
        """Add one turn. Half of it is the answer."""
        half = int(self._grown * _CHARS_PER_TOKEN / 2)
        for role in ("assistant", "user"):
            self.messages.append({"role": role, "content": self._text(half)})

    def _text(self, num_chars: int) -> str:
        found: list[str] = []
        while sum(map(len, found)) + len(found) < num_chars:
            found += self._rng.choices(self._words, k=20)
        return " ".join(found)


@asynccontextmanager
async def _mesh(max_bytes: str, max_model_len: int) -> AsyncIterator[Mesh]:
    spec = MeshSpec(
        engine="sim",
        model_dir=_MODEL,
        http_port=0,
        grpc_port=0,
        env={
            "PDMESH_SIM_LAW": "zero",
            "PDMESH_MAX_MODEL_LEN": str(max_model_len),
            "PDMESH_GATEWAY_SECTION_CACHE_BYTES": max_bytes,
        },
    )
    with tempfile.TemporaryDirectory(prefix="pdmesh-long-chats-") as folder:
        async with Mesh(spec, Path(folder)) as mesh:
            yield mesh


async def _ask(client: httpx.AsyncClient, mesh: Mesh, messages: Messages) -> tuple[int, float]:
    """Send the messages; returns the number of prompt tokens, and the milliseconds until the
    one-token answer came.
    """
    began = time.monotonic()
    body = {"model": "default", "messages": messages, "max_tokens": 1, "temperature": 0}
    answer = await client.post(f"{mesh.http_url}/v1/chat/completions", json=body)
    answer.raise_for_status()
    return answer.json()["usage"]["prompt_tokens"], 1000 * (time.monotonic() - began)


async def _taken(client: httpx.AsyncClient, mesh: Mesh, kind: str, messages: Messages) -> Turn:
    alone = [(await _ask(client, mesh, _SHORT))[1] for _ in range(20)]
    processes = ProcessSet({"gateway": mesh.pid("gateway-0")})
    before = processes.costs()
    num_tokens, ttft_ms = await _ask(client, mesh, messages)
    cpu_ms = 1000 * cpu_between(before, processes.costs())["gateway"]
    beside = await _beside(client, mesh, messages)
    return Turn(kind, num_tokens, cpu_ms, ttft_ms, max(alone), beside)


async def _beside(client: httpx.AsyncClient, mesh: Mesh, messages: Messages) -> float:
    """Milliseconds of the slowest short request beside a long chat that no mesh has seen."""
    other = [{**messages[0], "content": f"{time.monotonic()} {messages[0]['content']}"}]
    long = asyncio.create_task(_ask(client, mesh, [*other, *messages[1:]]))
    slowest = 0.0
    while not long.done():
        slowest = max(slowest, (await _ask(client, mesh, _SHORT))[1])
    await long
    return slowest


async def run(num_tokens: int, num_grown: int, num_turns: int) -> list[Turn]:
    chat, found = Chat(num_tokens, num_grown), list[Turn]()
    progress = Progress(num_turns)
    async with AsyncExitStack() as stack:
        room = 2 * (num_tokens + num_grown * (num_turns + 1))
        meshes = {
            kind: await stack.enter_async_context(_mesh(size, room))
            for kind, size in _KINDS.items()
        }
        client = await stack.enter_async_context(httpx.AsyncClient(timeout=300))
        for mesh in meshes.values():
            await _ask(client, mesh, chat.messages)
        for number in range(num_turns):
            progress.step(f"turn {number + 1}")
            chat.grow()
            for kind in sorted(meshes, reverse=bool(number % 2)):
                found.append(await _taken(client, meshes[kind], kind, chat.messages))
    progress.close()
    return found


def as_markdown(turns: Sequence[Turn]) -> str:
    kinds = [[turn for turn in turns if turn.kind == kind] for kind in _KINDS]
    rows = [
        (
            each[0].kind,
            f"{each[0].num_tokens:,} to {each[-1].num_tokens:,}",
            *(
                _cell([getattr(turn, name) for turn in each])
                for name in ("gateway_cpu_ms", "ttft_ms", "alone_ms", "beside_ms")
            ),
        )
        for each in kinds
    ]
    kept, fresh = kinds
    ratio = _cell([a.gateway_cpu_ms / b.gateway_cpu_ms for a, b in zip(kept, fresh, strict=True)])
    head = (
        "tokens of earlier turns",
        "tokens per prompt",
        "gateway's CPU, ms",
        "to the first token, ms",
        "slowest of 20 short requests, ms",
        "slowest short request beside a chat that is new, ms",
    )
    return f"{table(head, rows)}\n\nThe gateway's CPU, kept / not kept: {ratio}."


def _cell(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}..{max(values):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=100_000, help="of the first turn's prompt")
    parser.add_argument("--grows", type=int, default=1000, help="tokens of each further turn")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--out", type=Path, help="writes OUT.md and OUT.json")
    args = parser.parse_args()
    turns = asyncio.run(run(args.tokens, args.grows, args.turns))
    text = as_markdown(turns)
    print(text)
    if args.out:
        title = "A turn of a very long chat"
        found = [asdict(turn) for turn in turns]
        write(args.out, "loadtests.gateway.long_chats", title, ABOUT, text, turns=found)


if __name__ == "__main__":
    main()
