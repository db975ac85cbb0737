"""What a long prompt costs a gateway: CPU on its event loop and on its other threads, and the rate.

    make bench NAME=prompt-cost [ARGS="--rounds 5 --prompts 24 --cores 8"]

The sim instances of the mesh compute in no time. Prompts come one after the other: first new ones
of 60,000 and of 100,000 tokens, then the turns of a chat of 100,000 tokens. Each turn adds 1,000
tokens to the chat, and the tokens of earlier turns are kept. At the end, several new prompts of
60,000 tokens come at once.

One thread runs the event loop. So the time that a prompt takes on this thread limits a gateway on
any number of cores. The time for which other threads hold the interpreter's lock limits it as well.
The kernel counts the CPU time of threads in ticks of 10 ms. For this reason, a sample has many
prompts.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import httpx
from tokenizers import Tokenizer as HfTokenizer

from loadtests.gateway.report import table
from loadtests.gateway.scenarios import CHAT_PATH
from loadtests.harness.client import chat_body
from loadtests.harness.generator import ROOT
from loadtests.harness.mesh import instance_settings
from loadtests.harness.processes import ProcessSet, cpu_between, machine_busy_s, thread_cpu_s
from loadtests.harness.progress import Progress
from loadtests.harness.results import Spread, write
from pdmesh.core.kv.prefix.block_hash import token_array
from pdmesh.launcher.mesh import Mesh
from pdmesh.launcher.spec import MeshSpec
from pdmesh.services.gateway.text.encoding_threads import long_threads

MODEL: Final = ROOT / ".cache/models/SmolLM2-135M-Instruct"
_CHARS_PER_TOKEN: Final = 3.1  # characters per token of this text with SmolLM2's tokenizer
ROOM: Final = 1 << 18  # tokens
_AT_ONCE: Final = 4
_NUM_ENCODED: Final = 4
_PER_S_BAR: Final = 60.0  # prompts per second, each of 60,000 tokens
_CORES_BAR: Final = 0.1  # cores that one prompt per second takes, of 100,000 tokens
ABOUT: Final = (
    "CPU of the gateway's process for one prompt, in ms. Each cell: the median over the rounds "
    "(lowest..highest). Nothing here is an absolute claim about a quiet machine: a busy neighbour "
    "on a core's other thread can double the CPU time of the same work."
)


@dataclass(frozen=True, slots=True)
class Sample:
    """The results of many prompts of one case in one round. Times are per prompt."""

    case: str
    num_tokens: float
    loop_ms: float  # CPU of the gateway's first thread, which runs the loop
    others_ms: float  # CPU of the gateway's other threads
    mesh_ms: float  # CPU of all processes of the mesh, and of this one
    per_s: float
    free_cores: float  # cores that no process outside of the mesh used

    @property
    def gateway_ms(self) -> float:
        return self.loop_ms + self.others_ms

    @property
    def expected_per_s(self) -> float:
        """The rate that the free cores allow, given the CPU that all processes use per prompt."""
        return 1e3 * self.free_cores / self.mesh_ms


@dataclass(frozen=True, slots=True)
class Bounds:
    """The prompts per second that one gateway process can take on `num_cores`, by each limit.

    `lock_ms` is how long other threads hold the interpreter's lock for a prompt.
    """

    num_cores: int
    lock_ms: float
    sample: Sample

    @property
    def of_loop(self) -> float:
        return 1e3 / (self.sample.loop_ms + self.lock_ms)

    @property
    def of_tokenizer(self) -> float:
        """The limit set by the number of long texts that a gateway tokenizes at once."""
        return 1e3 * long_threads(self.num_cores) / max(1.0, self.sample.others_ms)

    @property
    def of_cores(self) -> float:
        return 1e3 * self.num_cores / self.sample.gateway_ms

    @property
    def per_s(self) -> float:
        return min(self.of_loop, self.of_tokenizer, self.of_cores)


class Texts:
    """Makes texts of words that the tokenizer has seen, in a new order."""

    def __init__(self) -> None:
        text = (ROOT / "README.md").read_text() + (ROOT / "docs/architecture.md").read_text()
        self._words, self._rng = text.split(), random.Random(7)
        self._chars = statistics.mean(map(len, self._words)) + 1
        self._numbers = itertools.count()

    def new(self, num_tokens: int) -> str:
        """A text of about `num_tokens`. No earlier text begins with the same words."""
        count = int(num_tokens * _CHARS_PER_TOKEN / self._chars)
        return f"{next(self._numbers)} {' '.join(self._rng.choices(self._words, k=count))}"


class Prober:
    """Sends prompts to the mesh, and measures their cost."""

    def __init__(self, mesh: Mesh, client: httpx.AsyncClient) -> None:
        self._url, self._client = f"{mesh.http_url}{CHAT_PATH}", client
        self._gateway = mesh.pid("gateway-0")
        pids = {name: mesh.pid(name) for name in mesh.names}
        self._all = ProcessSet({**pids, "asking": os.getpid()})

    async def ask(self, body: str) -> int:
        """Send a prompt; returns the number of its tokens."""
        headers = {"content-type": "application/json"}
        answer = await self._client.post(self._url, content=body.encode(), headers=headers)
        answer.raise_for_status()
        return int(answer.json()["usage"]["prompt_tokens"])

    async def sample(self, case: str, bodies: Sequence[str], at_once: int = 1) -> Sample:
        threads, costs, busy_s = thread_cpu_s(self._gateway), self._all.costs(), machine_busy_s()
        began, left, lengths = time.monotonic(), iter(bodies), list[int]()

        async def client() -> None:
            for body in left:
                lengths.append(await self.ask(body))

        await asyncio.gather(*(client() for _ in range(at_once)))
        took_s = time.monotonic() - began
        own_s = sum(cpu_between(costs, self._all.costs()).values())
        other_cores = max(0.0, machine_busy_s() - busy_s - own_s) / took_s
        loop_s, others_s = _spent(threads, thread_cpu_s(self._gateway), self._gateway)
        each = 1e3 / len(bodies)
        return Sample(
            case,
            statistics.mean(lengths),
            loop_s * each,
            others_s * each,
            own_s * each,
            len(bodies) / took_s,
            (os.cpu_count() or 1) - other_cores,
        )


def _spent(
    before: Mapping[int, float], after: Mapping[int, float], first: int
) -> tuple[float, float]:
    """The CPU seconds of the first thread, and those of all other threads together."""
    spent = {thread: cpu_s - before.get(thread, 0.0) for thread, cpu_s in after.items()}
    return spent.pop(first), sum(spent.values())


@dataclass(frozen=True, slots=True)
class Library:
    """The CPU that the tokenizer's library alone takes for one text, in this process.

    The library encodes without the interpreter's lock. Then it converts the tokens to Python
    numbers and frees them. For this, it holds the lock for `lock_ms`.
    """

    ms: float
    lock_ms: float

    @classmethod
    def measured(cls, inner: HfTokenizer, texts: Sequence[str]) -> Library:
        all_s = lock_s = 0.0
        for text in texts:
            began = time.process_time()
            encoded = inner.encode_batch_fast([text], add_special_tokens=False)
            encoded_at = time.process_time()
            token_array(encoded[0].ids)
            del encoded
            now = time.process_time()
            all_s, lock_s = all_s + now - began, lock_s + now - encoded_at
        return cls(1e3 * all_s / len(texts), 1e3 * lock_s / len(texts))


@dataclass(frozen=True, slots=True)
class Round:
    """The results of one round. `libraries` is for texts of 60,000 and of 100,000 tokens."""

    samples: Sequence[Sample]
    libraries: Sequence[Library]


@asynccontextmanager
async def _prober() -> AsyncIterator[Prober]:
    settings = {**instance_settings("sim"), "MAX_MODEL_LEN": str(ROOM)}
    spec = MeshSpec(
        engine="sim",
        model_dir=MODEL,
        http_port=0,
        grpc_port=0,
        service_env={
            role: {f"PDMESH_{role.upper()}_{name}": value for name, value in settings.items()}
            for role in ("prefill", "decode")
        },
    )
    with tempfile.TemporaryDirectory(prefix="pdmesh-prompt-cost-") as folder:
        async with Mesh(spec, Path(folder)) as mesh, httpx.AsyncClient(timeout=300) as client:
            yield Prober(mesh, client)


def _cold(texts: Texts, num_tokens: int, count: int) -> list[str]:
    return [chat_body(texts.new(num_tokens), 1, is_stream=False) for _ in range(count)]


def _turns(texts: Texts, num_tokens: int, num_grown: int, count: int) -> list[str]:
    """The bodies of a chat: first one of `num_tokens`, then `count` with one more turn each.

    Half of each turn is an answer.
    """
    messages: list[dict[str, str]] = []
    bodies = []
    for number in range(num_tokens // num_grown + count):
        messages += [
            {"role": role, "content": texts.new(num_grown // 2)} for role in ("assistant", "user")
        ]
        if number >= num_tokens // num_grown - 1:
            bodies.append(chat_body(messages, 1, is_stream=False))
    return bodies


async def run(rounds: int, num_prompts: int) -> list[Round]:
    texts, found = Texts(), list[Round]()
    inner = HfTokenizer.from_file(str(MODEL / "tokenizer.json"))
    progress = Progress(4 * rounds)
    async with _prober() as prober:
        for body in _cold(texts, 60_000, _AT_ONCE):
            await prober.ask(body)
        for number in range(rounds):
            samples, libraries = list[Sample](), list[Library]()
            for num_tokens in (60_000, 100_000):
                progress.step(f"round {number + 1}: new, {num_tokens:,} tokens")
                alone = [texts.new(num_tokens) for _ in range(_NUM_ENCODED)]
                libraries.append(Library.measured(inner, alone))
                bodies = _cold(texts, num_tokens, num_prompts)
                samples.append(await prober.sample(f"new, {num_tokens:,}", bodies))
            progress.step(f"round {number + 1}: a chat that grows")
            first, *turns = _turns(texts, 100_000, 1000, num_prompts)
            await prober.ask(first)
            samples.append(await prober.sample("a turn of 1,000 more", turns))
            progress.step(f"round {number + 1}: {_AT_ONCE} at once")
            bodies = _cold(texts, 60_000, num_prompts)
            samples.append(await prober.sample(f"new, {_AT_ONCE} at once", bodies, _AT_ONCE))
            found.append(Round(samples, libraries))
    progress.close()
    return found


Cases = Sequence[Sequence[Sample]]


def as_markdown(rounds: Sequence[Round], num_cores: int) -> str:
    cases = list(zip(*(each.samples for each in rounds), strict=True))
    bounds = [
        Bounds(num_cores, each.libraries[0].lock_ms, sample)
        for each, sample in zip(rounds, cases[0], strict=True)
    ]
    parts = [
        _costs(cases),
        _beside_library(rounds, cases),
        _projection(bounds, cases[1]),
        _at_once(cases[-1]),
        f"Load average at the end: {os.getloadavg()[0]:.1f}.",
    ]
    return "\n\n".join(parts)


def _costs(cases: Cases) -> str:
    head = ("prompts", "tokens", "loop's thread, ms", "other threads, ms", "together, ms")
    rows = [
        (
            case[0].case,
            f"{statistics.mean(s.num_tokens for s in case):,.0f}",
            *(
                _spread([getattr(s, name) for s in case], ".1f")
                for name in ("loop_ms", "others_ms", "gateway_ms")
            ),
        )
        for case in cases
    ]
    return table(head, rows)


def _beside_library(rounds: Sequence[Round], cases: Cases) -> str:
    """The gateway's CPU divided by the CPU of the library alone, in each round."""
    short, long = (
        _spread(
            [s.gateway_ms / r.libraries[at].ms for s, r in zip(cases[at], rounds, strict=True)],
            ".2f",
        )
        for at in range(2)
    )
    alone = _spread([each.libraries[1].ms for each in rounds], ".1f")
    lock = _spread([each.libraries[0].lock_ms for each in rounds], ".1f")
    return (
        "The tokenizer's library alone, asked in turn in another process, takes "
        f"{alone} ms for 100,000 tokens. The gateway takes {long} times as much, and {short} times "
        "for 60,000 tokens. The library's thread holds the interpreter's lock for "
        f"{lock} ms per prompt of 60,000 tokens."
    )


def _projection(bounds: Sequence[Bounds], long: Sequence[Sample]) -> str:
    per_s = [each.per_s for each in bounds]
    cores = [sample.gateway_ms / 1e3 for sample in long]
    num_cores = bounds[0].num_cores
    rows = [
        ("by the loop, and the lock", _spread([b.of_loop for b in bounds], ".0f"), ""),
        (
            f"by {long_threads(num_cores)} threads for long texts",
            _spread([b.of_tokenizer for b in bounds], ".0f"),
            "",
        ),
        (f"by {num_cores} cores", _spread([b.of_cores for b in bounds], ".0f"), ""),
        (
            f"**prompts/s of 60,000 tokens, a gateway on {num_cores} cores**",
            _spread(per_s, ".0f"),
            f">= {_PER_S_BAR:.0f}: {_verdict(statistics.median(per_s) >= _PER_S_BAR)}",
        ),
        (
            "**cores for one prompt of 100,000 tokens per second**",
            _spread(cores, ".3f"),
            f"<= {_CORES_BAR}: {_verdict(statistics.median(cores) <= _CORES_BAR)}",
        ),
    ]
    return table(("projected from these times", "median (lowest..highest)", "bar"), rows)


def _at_once(samples: Sequence[Sample]) -> str:
    rate = _spread([s.per_s for s in samples], ".1f")
    agrees = _spread([s.per_s / s.expected_per_s for s in samples], ".2f")
    free = _spread([s.free_cores for s in samples], ".2f")
    return (
        f"On this machine, {_AT_ONCE} at once: {rate} prompts/s, with all processes of the mesh on "
        f"the same cores. That is {agrees} of what the CPU of all these processes per prompt gives "
        f"on the cores that other work left free ({free} of {os.cpu_count()})."
    )


def _spread(values: Sequence[float], form: str) -> str:
    return Spread.of(values).text(form)


def _verdict(is_met: bool) -> str:
    return "met" if is_met else "**not met**"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=24, help="of each case in a round")
    parser.add_argument("--cores", type=int, default=8, help="of the projection")
    parser.add_argument("--out", type=Path, help="writes OUT.md and OUT.json")
    args = parser.parse_args()
    rounds = asyncio.run(run(args.rounds, args.prompts))
    text = as_markdown(rounds, args.cores)
    print(text)
    if args.out:
        found = [asdict(each) for each in rounds]
        title = "What a long prompt costs a gateway"
        write(args.out, "loadtests.gateway.prompt_cost", title, ABOUT, text, rounds=found)


if __name__ == "__main__":
    main()
