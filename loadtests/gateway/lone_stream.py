"""How evenly a lone stream is served: alone, beside a steady load, and beside one greedy client.

    make bench NAME=lone-stream [ARGS="--rounds 3 --requests 3000"]

One client requests short streams one after the other, from our mesh and from an aiohttp passthrough
in turn. A second generator makes one of three loads: none, streams at Poisson times (a third of the
rate that our mesh carries), or prompts of 60,000 tokens without a pause. Turns of both servers
alternate in the same minutes, with the same load beside them.

Our engine computes in no time, and the gateway writes to a stream at most every 2 ms. The server
behind the passthrough also pauses 2 ms between two tokens, so that gaps can be compared.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from loadtests.gateway.overhead import ask_once, warm_up
from loadtests.gateway.prompt_cost import MODEL, ROOM, Texts
from loadtests.gateway.report import table
from loadtests.gateway.scenarios import CHAT_PATH, make_prompts
from loadtests.harness.client import LoadResult, LoadSpec, chat_body
from loadtests.harness.generator import beside, canned_server, measure, passthrough
from loadtests.harness.histogram import Histogram
from loadtests.harness.mesh import MeshOptions, running_mesh
from loadtests.harness.processes import ProcessSet
from loadtests.harness.progress import Progress
from loadtests.harness.results import Spread, write

OURS, PASSED = "pdmesh", "passthrough"
ALONE, STEADY, GREEDY = "alone", "beside a steady load", "beside a greedy client"
_NUM_TOKENS: Final = 4
_LOAD_TOKENS: Final = 32
_LOAD_CONNECTIONS: Final = 64
_GREEDY_TOKENS: Final = 60_000
_NUM_GREEDY: Final = 64  # so many different prompts that caches hold few of them
_THINK_S: Final = 0.001
_TOKEN_PAUSE_S: Final = 0.002  # the gateway's own shortest interval between writes to a stream
_LOOK_S: Final = 3.0  # how long the rate of short streams is measured; for long prompts, twice this
_WARMUP_S: Final = 0.5
_WATCH_S: Final = 0.02  # how often processes measure the lag of their loops
_GATEWAY: Final = "gateway-0"
_PROCESSES: Final = (_GATEWAY, "master-scheduler", "prefill-0", "decode-0")
_SHARES: Final = (0.5, 0.99, 0.999)
_PAUSE: Final = re.compile(
    r'^pdmesh_process_gc_pause_seconds_(count|sum)\{.*generation="(\d)".*\} (\S+)$', re.MULTILINE
)
_HELD: Final = re.compile(r"^pdmesh_process_loop_held_seconds(?:\{.*\})? (\S+)$", re.MULTILINE)
ABOUT: Final = (
    "Times in ms; each cell: the median over the rounds (lowest..highest). Ratios are those of one "
    "round. A turn ends after its number of streams or its time, so the longest of a turn depends "
    "on how many there were."
)


@dataclass(frozen=True, slots=True)
class Turn:
    """The results of one stack (our mesh or the passthrough) in one situation in one round.

    For our mesh, `held_ms` has the longest time for which each process kept its event loop busy.
    `collections` has the number and the seconds of the gateway's garbage collections, by Python's
    generations.
    """

    situation: str
    stack: str
    lone: LoadResult
    beside_per_s: float
    held_ms: Mapping[str, float]
    collections: Mapping[str, tuple[float, float]]

    @property
    def values(self) -> dict[str, list[float]]:
        """p50, p99, p99.9 and the longest of first tokens and of gaps, in ms."""
        return {"TTFT": _quantiles(self.lone.ttft), "gap": _quantiles(self.lone.gaps)}


def _quantiles(of: Histogram) -> list[float]:
    return [1e3 * each for each in (*map(of.quantile, _SHARES), of.longest_s)]


@dataclass(frozen=True, slots=True)
class Stack:
    """A server under test. `ops` has host:port of the metrics of each of its processes."""

    name: str
    port: int
    ops: Mapping[str, str] = field(default_factory=dict)

    def spec(self, bodies: Sequence[str], connections: int, seconds: float) -> LoadSpec:
        return LoadSpec(
            "127.0.0.1", self.port, CHAT_PATH, tuple(bodies), connections, _WARMUP_S, seconds
        )

    def metrics(self) -> dict[str, str]:
        """The metrics page of each process.

        A process reports the longest time for which it kept its loop busy since its page was last
        read.
        """
        return {name: _page(ops) for name, ops in self.ops.items()}


def _page(ops: str) -> str:
    with urllib.request.urlopen(f"http://{ops}/metrics", timeout=30) as answer:
        return str(answer.read(), "utf-8")


@dataclass(frozen=True, slots=True)
class Loads:
    """The requests to send beside the lone stream, and their rates."""

    short: tuple[str, ...]
    short_per_s: float
    long: tuple[str, ...]
    long_per_s: float

    def beside(self, situation: str, stack: Stack, seconds: float) -> LoadSpec | None:
        if situation == STEADY:
            spec = stack.spec(self.short, _LOAD_CONNECTIONS, seconds)
            return replace(spec, rate_per_s=self.short_per_s)
        if situation == GREEDY:
            spec = stack.spec(self.long, 1, seconds)
            return replace(spec, rate_per_s=self.long_per_s)
        return None


def find_loads(stack: Stack, prompts: Sequence[str]) -> Loads:
    """Measure the rates of the loads on this stack.

    The steady load is a third of the short streams that the stack carries. The greedy load is as
    many long prompts as one client can send.
    """
    short = tuple(chat_body(p, _LOAD_TOKENS, is_stream=True) for p in prompts)
    texts = Texts()
    long = tuple(
        chat_body(texts.new(_GREEDY_TOKENS), 1, is_stream=False) for _ in range(_NUM_GREEDY)
    )
    carried = measure(stack.spec(short, _LOAD_CONNECTIONS, _LOOK_S), ProcessSet({})).load
    one_client = measure(stack.spec(long, 1, 2 * _LOOK_S), ProcessSet({})).load
    return Loads(short, carried.requests_per_s / 3, long, one_client.requests_per_s)


def take_turn(stack: Stack, situation: str, lone: LoadSpec, loads: Loads, seconds: float) -> Turn:
    load = loads.beside(situation, stack, 10 * seconds)
    before = stack.metrics()
    with _beside(load) as other:
        found = measure(lone, ProcessSet({})).load
    after = stack.metrics()
    held = {name: _HELD.search(after[name]) for name in _PROCESSES if name in after}
    return Turn(
        situation,
        stack.name,
        found,
        other[0].requests_per_s if other else 0.0,
        {name: 1e3 * float(found[1]) for name, found in held.items() if found is not None},
        _collections(before.get(_GATEWAY, ""), after.get(_GATEWAY, "")),
    )


@contextlib.contextmanager
def _beside(load: LoadSpec | None) -> Iterator[list[LoadResult]]:
    if load is None:
        yield []
        return
    with beside(load) as found:
        yield found


def _collections(before: str, after: str) -> dict[str, tuple[float, float]]:
    """The number of garbage collections and their seconds, by Python's generations."""
    sides = [{(kind, of): float(v) for kind, of, v in _PAUSE.findall(t)} for t in (before, after)]
    grown = {key: value - sides[0].get(key, 0.0) for key, value in sides[1].items()}
    return {of: (grown["count", of], grown["sum", of]) for kind, of in grown if kind == "count"}


def measured(stacks: Sequence[Stack], options: argparse.Namespace) -> tuple[list[Turn], Loads]:
    prompts = make_prompts(512, 32)
    loads = find_loads(stacks[0], prompts)
    bodies = [chat_body(prompt, _NUM_TOKENS, is_stream=True) for prompt in prompts]
    situations = [s for s in (ALONE, STEADY, GREEDY) if options.only in s]
    progress, found = Progress(options.rounds * len(situations) * len(stacks)), list[Turn]()
    for number in range(options.rounds):
        for situation in situations:
            for stack in stacks if number % 2 == 0 else stacks[::-1]:
                progress.step(f"round {number + 1}: {stack.name} {situation}")
                spec = replace(
                    stack.spec(bodies, 1, options.seconds),
                    max_requests=options.requests,
                    think_s=_THINK_S,
                )
                found.append(take_turn(stack, situation, spec, loads, options.seconds))
    progress.close()
    return found, loads


async def run(options: argparse.Namespace) -> tuple[list[Turn], Loads]:
    prompts = make_prompts(512, 32)
    mesh_options = MeshOptions(
        "sim",
        model_dir=str(MODEL),
        max_model_len=ROOM,
        env={"PDMESH_LOOP_WATCH_S": str(_WATCH_S)},
    )
    with canned_server(_TOKEN_PAUSE_S) as upstream, passthrough(upstream) as passed:
        async with running_mesh(mesh_options) as mesh:
            await asyncio.to_thread(ask_once, mesh, prompts[0])
            await asyncio.to_thread(warm_up, mesh, prompts)
            stacks = [Stack(OURS, mesh.port, mesh.ops), Stack(PASSED, passed)]
            return await asyncio.to_thread(measured, stacks, options)


def as_markdown(turns: Sequence[Turn], loads: Loads) -> str:
    situations = list(dict.fromkeys(turn.situation for turn in turns))
    by = {
        (situation, stack): [t for t in turns if (t.situation, t.stack) == (situation, stack)]
        for situation in situations
        for stack in (OURS, PASSED)
    }
    head = ("", "stack", "p50", "p99", "p99.9", "longest")
    parts = []
    for what, name in (("TTFT", "First tokens"), ("gap", "Gaps between reads of a stream")):
        rows = []
        for situation in situations:
            ours, passed = by[situation, OURS], by[situation, PASSED]
            for stack, each in ((OURS, ours), (PASSED, passed)):
                rows.append((situation, stack, *_cells(each, what, ".2f")))
            rows.append((situation, "ours / passthrough", *_ratios(ours, passed, what)))
            if situation != ALONE and ALONE in situations:
                for stack in (OURS, PASSED):
                    pair = by[situation, stack], by[ALONE, stack]
                    rows.append((situation, f"{stack}, beside / alone", *_ratios(*pair, what)))
        parts.append(f"## {name}\n\n{table(head, rows)}")
    return "\n\n".join([*parts, _beside_text(turns, loads), _collector_text(turns)])


def _cells(turns: Sequence[Turn], what: str, form: str) -> list[str]:
    columns = zip(*(turn.values[what] for turn in turns), strict=True)
    return [Spread.of(column).text(form) for column in columns]


def _ratios(some: Sequence[Turn], others: Sequence[Turn], what: str) -> list[str]:
    """The ratios of `some` to `others`, with their spread. Each ratio is within one round."""
    rounds = [
        [a / b for a, b in zip(one.values[what], other.values[what], strict=True)]
        for one, other in zip(some, others, strict=True)
    ]
    return [Spread.of(column).text(".2f") for column in zip(*rounds, strict=True)]


def _beside_text(turns: Sequence[Turn], loads: Loads) -> str:
    def spread(read: Callable[[Turn], float], situation: str, stack: str) -> str:
        of = [read(t) for t in turns if (t.situation, t.stack) == (situation, stack)]
        return Spread.of(of).text(",.0f")

    about = (
        f"The steady load is {loads.short_per_s:.0f} streams/s of {_LOAD_TOKENS} tokens, a third "
        f"of what ours carried at {_LOAD_CONNECTIONS} connections. The greedy client has one "
        f"connection, and asks at most {loads.long_per_s:.1f} prompts/s, which is what one client "
        "got of ours."
    )
    rows = [
        (
            situation,
            stack,
            spread(lambda t: t.lone.num_requests, situation, stack),
            spread(lambda t: t.lone.gaps.count, situation, stack),
            spread(lambda t: sum(t.lone.errors.values()), situation, stack),
            spread(lambda t: t.beside_per_s, situation, stack),
        )
        for situation, stack in dict.fromkeys((t.situation, t.stack) for t in turns)
    ]
    head = ("", "stack", "streams of a turn", "gaps", "errors", "answers/s beside")
    return f"## Load\n\n{about}\n\n{table(head, rows)}"


def _collector_text(turns: Sequence[Turn]) -> str:
    ours = [turn for turn in turns if turn.stack == OURS]
    rows = []
    for situation in dict.fromkeys(turn.situation for turn in ours):
        of = [turn for turn in ours if turn.situation == situation]
        held = [
            Spread.of([turn.held_ms.get(name, 0.0) for turn in of]).text(".1f")
            for name in _PROCESSES
        ]
        cells = []
        for generation in "012":
            pairs = [turn.collections.get(generation, (0.0, 0.0)) for turn in of]
            count, total_s = (sum(each) for each in zip(*pairs, strict=True))
            cells.append(f"{count:.0f}, {1e3 * total_s / count:.1f} ms" if count else "none")
        rows.append((situation, *cells, *held))
    head = (
        "",
        *(f"collections of generation {n}" for n in range(3)),
        *(f"loop of {name} held, ms" for name in _PROCESSES),
    )
    about = (
        "Garbage collections of our gateway in all rounds, with their mean pause (its clock runs "
        "on while another process has the core). Then the longest that processes on a stream's "
        "way held their loops themselves, by `pdmesh.process.loop_held`, sampled every "
        f"{1e3 * _WATCH_S:.0f} ms. For the gateway that is an upper bound, which includes its "
        "tokenizer's thread. The prefill's is that of the sim engine: it writes the KV of a whole "
        "prompt at once on the prefill's loop, and a real engine has a process of its own."
    )
    load = f"Load average at the end: {os.getloadavg()[0]:.1f}."
    return f"## Our collector and loops\n\n{about}\n\n{table(head, rows)}\n\n{load}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=3000, help="lone streams of a turn")
    parser.add_argument("--seconds", type=float, default=26.0, help="of a turn, at most")
    parser.add_argument("--only", default="", help="situations whose name contains this")
    parser.add_argument("--out", type=Path, help="writes OUT.md and OUT.json")
    options = parser.parse_args()
    turns, loads = asyncio.run(run(options))
    text = as_markdown(turns, loads)
    print(text)
    if options.out:
        found = [
            {
                "situation": turn.situation,
                "stack": turn.stack,
                "lone": json.loads(turn.lone.to_json()),
                "beside_per_s": turn.beside_per_s,
                "held_ms": turn.held_ms,
                "collections": turn.collections,
            }
            for turn in turns
        ]
        title = "A lone stream, alone and beside load"
        write(options.out, "loadtests.gateway.lone_stream", title, ABOUT, text, turns=found)


if __name__ == "__main__":
    main()
