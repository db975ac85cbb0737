"""How well the master predicts times on vLLM for requests whose shape differs from those that it
learnt from.

    make bench NAME=predictor          about ten minutes; needs vLLM and the prepared model
    python -m loadtests.placement.predictor --judge loadtests/results/predictor-DATE.json

Two real meshes run one after the other. In the first, a prefill computes the prompts. In the
second, a decode computes prompts beside the sequences that it decodes, as in a group that has lost
its prefills. Each mesh learns from prompts of one family and is judged on other families. The
benchmark records the instances' reports and replays them to the master's own core. The predictions
of this core are judged. So `--judge` can judge a changed core by the same reports. The expected
time to the first token comes from the master's plan.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from loadtests.harness.generator import ROOT
from loadtests.harness.results import describe_versions, write
from loadtests.placement import families
from loadtests.placement.predictor_report import Ended, Reported, Round, report
from loadtests.traffic import workloads
from loadtests.traffic.loops import Answer, Connections, Target
from loadtests.traffic.workloads import Arrival, block_name
from pdmesh.events.v1.events_pb2 import InstanceLoad, RequestFinished
from pdmesh.launcher.mesh import Mesh
from pdmesh.launcher.spec import MeshSpec
from pdmesh.net import subjects
from pdmesh.net.bus import Message
from pdmesh.net.events import decode_event
from pdmesh.net.nats.bus import NatsBus

MODEL: Final = ROOT / ".cache/models/SmolLM2-135M-Instruct"
_BLOCK: Final = 64
_MOST_TOKENS: Final = 2000
_MOONCAKE: Final = "mooncake_conversation_trace.jsonl"
# (tokens, shared blocks) of the prompts that are repeated. One in five prompts of a shape is cold.
_SHAPES: Final = ((150, 0), (500, 0), (1400, 0), (500, 6), (1400, 12), (1400, 20))
_REPEATS: Final = 5
_STREAMS: Final = (0, 3)  # numbers of streams that decode beside the repeated prompts
_STREAM_TOKENS: Final = (40, 200)  # of a stream's prompt and answer
_MOST_OPEN: Final = 3
_SETTLE_S: Final = 30.0
_TTFT_S: Final = 110.0  # so long that no request is refused
_START_S: Final = 900.0


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests to play.

    At most `most_open` requests are open at once, so a slow machine refuses no request. A request
    first waits until fewer are open. Then it waits for the time between the previous arrival and
    its own. During the trace, `num_streams` streams decode. Each is followed by another.
    """

    name: str
    arrivals: Sequence[Arrival]
    most_open: int = _MOST_OPEN
    num_streams: int = 0


@dataclass(frozen=True, slots=True)
class Site:
    """A kind of mesh, and its load.

    `num_output` is the least and the greatest number of tokens of an answer. `rate` is in requests
    per second.
    """

    name: str
    num_prefill: int
    num_output: tuple[int, int]
    rate: float
    streams: Sequence[int]


SITES: Final = (
    Site("prefill", 1, (1, 4), 2.0, (0,)),
    Site("local at a decode", 0, (8, 40), 1.2, _STREAMS),
)


def traces(site: Site, folder: Path | None, seed: int, count: int) -> Iterator[Trace]:
    """The traces of a site. The predictor learns from the first."""
    rng = random.Random(seed)
    yield Trace("learn", _paced(_uniform(rng, count + count // 2), site, rng))
    for num_streams in site.streams:
        name = f"repeats beside {num_streams}" if num_streams else "repeats"
        yield Trace(name, _repeats(rng, site, num_streams), 1, num_streams)
    chats = workloads.chats(
        rng,
        num_chats=count // 5,
        num_turns=5,
        first_tokens=200,
        turn_tokens=60,
        num_output_tokens=60,
        rate_per_s=site.rate / 5,
        think_s=3.0,
    )
    yield Trace("chats", [_answered(a, site, rng) for a in chats])
    tools = [
        replace(a, num_prompt_tokens=a.num_prompt_tokens * _BLOCK // families.BLOCK)
        for a in families.toolagent(seed, 4 * count)
    ]
    yield Trace("tool calls", _paced(_short(tools)[:count], site, rng))
    if folder is not None and (folder / _MOONCAKE).exists():
        arrivals = workloads.mooncake(folder / _MOONCAKE)[: 4 * count]
        yield Trace(
            "Mooncake", _paced(_short(workloads.scaled(arrivals, lengths=0.05))[:count], site, rng)
        )


def _uniform(rng: random.Random, count: int) -> Iterator[Arrival]:
    for _ in range(count):
        num_tokens = rng.randrange(32, 1200)
        shared = rng.choice((0.0, 0.0, 0.25, 0.5, 0.75))
        name = rng.randrange(4)
        blocks = [block_name(-11, name, i, 0) for i in range(int(shared * num_tokens) // _BLOCK)]
        yield Arrival(0.0, num_tokens, 1, tuple(blocks))


def _repeats(rng: random.Random, site: Site, salt: int) -> list[Arrival]:
    arrivals = [
        Arrival(
            0.0,
            num_tokens,
            site.num_output[0],
            tuple(block_name(-13, salt, shape, i) for i in range(num_shared)),
        )
        for shape, (num_tokens, num_shared) in enumerate(_SHAPES)
        for _ in range(_REPEATS)
    ]
    rng.shuffle(arrivals)
    # The tokens after the shared blocks are random, with the time as seed. So no two prompts are
    # equal.
    return [replace(a, at_s=salt + n / 1000) for n, a in enumerate(arrivals)]


def _short(arrivals: Sequence[Arrival]) -> list[Arrival]:
    return [a for a in arrivals if 16 <= a.num_prompt_tokens <= _MOST_TOKENS]


def _answered(arrival: Arrival, site: Site, rng: random.Random) -> Arrival:
    return replace(arrival, num_output_tokens=rng.randint(*site.num_output), scenario="default")


def _paced(
    arrivals: Iterator[Arrival] | Sequence[Arrival], site: Site, rng: random.Random
) -> list[Arrival]:
    return workloads.poisson([_answered(a, site, rng) for a in arrivals], site.rate, rng)


@dataclass(slots=True)
class Watch:
    """Collects the mesh's reports about its requests. Each is stored with the name of the trace."""

    site: str
    trace: str = ""
    num_ended: int = 0
    reported: list[Reported] = field(default_factory=list)
    ended: list[Ended] = field(default_factory=list)

    async def listen(self, bus: NatsBus) -> None:
        await bus.subscribe(subjects.instance_load(), self._on_load)
        await bus.subscribe(subjects.request_finished(), self._on_finished)

    async def until_ended(self, count: int) -> None:
        """Wait until `count` requests have ended since the beginning."""
        async with asyncio.timeout(_SETTLE_S):
            while self.num_ended < count:
                await asyncio.sleep(0.05)

    async def _on_load(self, message: Message) -> None:
        event = decode_event(message, InstanceLoad)
        if event.computed:
            self.reported.append(
                Reported(
                    self.site,
                    self.trace,
                    event.header.publisher_id,
                    time.monotonic(),
                    event.num_slots_used,
                    [
                        (c.num_tokens, c.num_cached_tokens, c.seconds, c.num_steps, c.num_beside)
                        for c in event.computed
                    ],
                )
            )

    async def _on_finished(self, message: Message) -> None:
        event = decode_event(message, RequestFinished)
        self.num_ended += 1
        self.ended.append(
            Ended(
                self.site,
                self.trace,
                event.outcome,
                event.usage.num_prompt_tokens,
                event.usage.num_cached_tokens,
                event.num_rejections,
                event.planned_ms / 1e3,
                event.ttft_ms / 1e3,
                event.expected_ms / 1e3,
            )
        )


async def measure(site: Site, played: Sequence[Trace], model_dir: Path) -> Watch:
    spec = MeshSpec(
        engine="vllm",
        model_dir=model_dir,
        num_prefill=site.num_prefill,
        num_decode=1,
        http_port=0,
        grpc_port=0,
        start_timeout_s=_START_S,
        service_env={"gateway": {"PDMESH_GATEWAY_TTFT_S": str(_TTFT_S)}},
    )
    with tempfile.TemporaryDirectory(prefix="pdmesh-predictor-") as directory:
        async with Mesh(spec, Path(directory), report=_say) as mesh:
            bus = await NatsBus.connect(mesh.nats_url, "predictor")
            watch = Watch(site.name)
            await watch.listen(bus)
            target, num_sent = Target.at(mesh.http_url), 0
            for trace in played:
                watch.trace = trace.name
                _say(f"{site.name}: {trace.name}, {len(trace.arrivals)} requests")
                num_sent += await _play(target, trace)
                await watch.until_ended(num_sent)
            await bus.close()
    return watch


async def _play(target: Target, trace: Trace) -> int:
    """Play a trace; returns the number of requests, including the streams."""
    connections, answers, num_streamed = Connections(target), list[Answer](), 0
    places, is_over = asyncio.Semaphore(trace.most_open), False

    async def stream(number: int) -> None:
        nonlocal num_streamed
        while not is_over:
            num_streamed += 1
            arrival = Arrival(100.0 * number + num_streamed, *_STREAM_TOKENS)
            await connections.ask(Answer(arrival, 0.0))

    async def ask(answer: Answer) -> None:
        await connections.ask(answer)
        places.release()

    streams = [asyncio.create_task(stream(n)) for n in range(trace.num_streams)]
    asked, before_s = list[asyncio.Task[None]](), 0.0
    for arrival in trace.arrivals:
        await places.acquire()
        await asyncio.sleep(arrival.at_s - before_s)
        before_s = arrival.at_s
        answers.append(Answer(arrival, 0.0))
        asked.append(asyncio.create_task(ask(answers[-1])))
    await asyncio.gather(*asked)
    is_over = True
    await asyncio.gather(*streams)
    connections.close()
    _check(answers)
    return len(answers) + num_streamed


def _check(answers: Sequence[Answer]) -> None:
    num_failed = sum(not a.is_answered for a in answers)
    if num_failed > len(answers) // 10:
        raise SystemExit(f"{num_failed} of {len(answers)} requests have no answer")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


async def _measured(options: argparse.Namespace) -> Round:
    found, began, loads = Round([], []), datetime.now(UTC), [os.getloadavg()[2]]
    for site in SITES:
        if options.only in ("", site.name):
            played = list(traces(site, options.traces, options.seed, options.count))
            watch = await measure(site, played, options.model_dir)
            found.reported.extend(watch.reported)
            found.ended.extend(watch.ended)
            loads.append(os.getloadavg()[2])
    sites = options.only or "both sites"
    told = ", ".join(f"{load:.1f}" for load in loads)
    return replace(
        found,
        conditions=(
            f"{sites}: began {began.isoformat(timespec='minutes')}; load average over 15 minutes "
            f"before and after each site {told}; {describe_versions()['pdmesh commit']}"
        ),
    )


def _read(path: Path) -> list[Round]:
    return [
        Round(
            [Reported(**r) for r in each["reported"]],
            [Ended(**e) for e in each["ended"]],
            each.get("conditions", ""),
        )
        for each in json.loads(path.read_text())["rounds"]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model-dir", type=Path, default=MODEL)
    parser.add_argument("--traces", type=Path, help="folder of the public traces")
    parser.add_argument("--count", type=int, default=60, help="requests of a judged trace")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", choices=[s.name for s in SITES])
    parser.add_argument(
        "--judge", type=Path, nargs="+", help="JSON of records, as one record of all their rounds"
    )
    parser.add_argument("--out", type=Path, help="write OUT.json and OUT.md")
    options = parser.parse_args()
    if options.judge:
        rounds = [each for path in options.judge for each in _read(path)]
    else:
        rounds = [asyncio.run(_measured(options))]
    text = report(rounds)
    print(text)
    if options.out:
        about = (
            "SmolLM2-135M on vLLM, on a CPU. Each site learns from `learn` and is judged on the "
            "others; it goes on learning, as in a mesh. MAPE in percent."
        )
        write(
            options.out,
            "loadtests.placement.predictor",
            "Predicted times on vLLM",
            about,
            text,
            rounds=[asdict(each) for each in rounds],
        )


if __name__ == "__main__":
    main()
