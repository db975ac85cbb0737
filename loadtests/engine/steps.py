"""How much asynchronous scheduling gains on vLLM: gap between steps, tokens/s, TPOT (S139, S140,
S146, S147).

    python -m loadtests.engine.steps             needs vLLM and the prepared model (make model)

For each role, two engines answer the same prompts in turn. One of them schedules asynchronously, so
it schedules a step while it computes the one before. The engine that waits for its turn is idle. A
gap is the time before a step in which the engine's rank computed nothing, although the step
continues the requests of the step before. The decodes get short prompts with long answers. The
prefills get long prompts with one token. The fusion instances get both at once.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from array import array
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from loadtests.gateway.report import table
from loadtests.harness.generator import ROOT
from loadtests.harness.results import quantile, write
from pdmesh.core.instance.async_scheduling import AsyncScheduling
from pdmesh.core.instance.urgency import DEFAULT_PRIORITY
from pdmesh.engine.base import Finished, FinishReason, Prefilled, PrefillJob, Sampling, Tokens
from pdmesh.engine.vllm.config import VllmConfig
from pdmesh.engine.vllm.engine import VllmEngine

MODEL: Final = ROOT / ".cache/models/SmolLM2-135M-Instruct"
BATCHES: Final = (1, 8, 32)
MODES: Final = {"sync": AsyncScheduling.OFF, "async": AsyncScheduling.ON}
COUNTED: Final = (
    "num_steps",
    "num_steady",
    "num_overlapped",
    "schedule_s",
    "compute_s",
    "process_s",
    "gap_s",
    "num_tokens_past_end",
)


@dataclass(frozen=True, slots=True)
class Work:
    """The lengths of a request's prompt and answer."""

    num_prompt_tokens: int
    max_tokens: int


ROLES: Final[Mapping[str, tuple[Work, ...]]] = {
    "decode": (Work(16, 48),),
    "prefill": (Work(400, 1),),
    "fusion": (Work(16, 48), Work(300, 12)),
}


@dataclass(frozen=True, slots=True)
class Measure:
    """The result of one turn, in which one engine answers the prompts of one batch."""

    role: str
    mode: str
    batch: int
    wall_s: float
    num_tokens: int
    tpot_s: Sequence[float]  # of each answer that has several tokens
    steps: Mapping[str, float]

    @property
    def gap_ms(self) -> float:
        return 1e3 * self.steps["gap_s"] / max(1.0, self.steps["num_steady"])

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.wall_s

    @property
    def step_ms(self) -> Mapping[str, float]:
        count = max(1.0, self.steps["num_steps"])
        return {part: 1e3 * self.steps[f"{part}_s"] / count for part in PARTS}


PARTS: Final = ("schedule", "compute", "process")


class Driver:
    """Sends requests to one engine, and measures the answers."""

    def __init__(self, engine: VllmEngine) -> None:
        self._engine = engine
        self._num_legs = 0
        self._times: dict[int, list[float]] = {}
        self._open: set[int] = set()
        self._ended = asyncio.Event()

    async def follow(self) -> None:
        async for outputs in self._engine.outputs():
            now = time.perf_counter()
            for output in outputs:
                match output:
                    case Prefilled():
                        self._times[output.leg].append(now)
                        self._end(output.leg, output.finish_reason)
                    case Tokens():
                        self._times[output.leg] += [now] * len(output.token_ids)
                    case Finished():
                        self._end(output.leg, output.finish_reason)

    def _end(self, leg: int, reason: FinishReason | None) -> None:
        if reason is not None:
            self._open.discard(leg)
            if not self._open:
                self._ended.set()

    async def answer(
        self, prompts: Sequence[tuple[Sequence[int], int]], priorities: Sequence[int] = ()
    ) -> list[list[float]]:
        """Send all requests at once, in this order; returns the times of each answer's tokens."""
        self._ended.clear()
        legs = range(self._num_legs + 1, self._num_legs + 1 + len(prompts))
        self._num_legs += len(prompts)
        self._open, self._times = set(legs), {leg: [] for leg in legs}
        for number, (prompt, max_tokens) in enumerate(prompts):
            job = PrefillJob(
                legs[number],
                f"r{legs[number]}",
                0,
                array("I", prompt),
                Sampling(max_tokens),
                priority=priorities[number] if priorities else DEFAULT_PRIORITY,
            )
            self._engine.prefill(job)
        await self._ended.wait()
        return [self._times[leg] for leg in legs]

    def counts(self) -> dict[str, float]:
        told = self._engine.stats().extra
        return {name: told.get(name, 0.0) for name in COUNTED}


def config_of(role: str, mode: str) -> VllmConfig:
    config = VllmConfig(
        f"steps-{role}-{mode}",
        1,
        MODEL,
        "smollm2",
        block_size=64,
        max_model_len=1024,
        max_num_seqs=max(BATCHES),
        staging_bytes=8 << 20,
        landing_bytes=8 << 20,
        async_scheduling=MODES[mode],
    )
    if role != "prefill":
        config = replace(config, staging_bytes=0)
    return config if role == "decode" else replace(config, landing_bytes=0)


@asynccontextmanager
async def driven(config: VllmConfig) -> AsyncIterator[Driver]:
    engine = VllmEngine(config)
    await engine.start()
    driver = Driver(engine)
    following = asyncio.create_task(driver.follow())
    try:
        yield driver
    finally:
        following.cancel()
        await engine.stop()


async def turn(driver: Driver, role: str, mode: str, batch: int, seed: int) -> Measure:
    rng = random.Random(seed)
    works = [ROLES[role][n % len(ROLES[role])] for n in range(batch)]
    prompts = [
        (rng.choices(range(1000, 40000), k=work.num_prompt_tokens), work.max_tokens)
        for work in works
    ]
    before, began = driver.counts(), time.perf_counter()
    times = await driver.answer(prompts)
    wall_s = time.perf_counter() - began
    await asyncio.sleep(0.3)  # the engine reports a step's counts later than its tokens
    after = driver.counts()
    is_answer = role != "prefill"
    return Measure(
        role,
        mode,
        batch,
        wall_s,
        # The tokens of the answers. For a prefill, they are the tokens of the prompts.
        sum(map(len, times)) if is_answer else sum(len(prompt) for prompt, _ in prompts),
        [(each[-1] - each[0]) / (len(each) - 1) for each in times if len(each) > 1],
        {name: after[name] - before[name] for name in COUNTED},
    )


async def run(roles: Sequence[str], batches: Sequence[int], rounds: int) -> list[Measure]:
    measures = list[Measure]()
    for role in roles:
        async with AsyncExitStack() as engines:
            drivers = {
                mode: await engines.enter_async_context(driven(config_of(role, mode)))
                for mode in MODES
            }
            for mode, driver in drivers.items():
                await turn(driver, role, mode, max(batches), seed=0)  # warm-up
            for number in range(rounds):
                for batch in batches:
                    order = list(drivers) if number % 2 else list(drivers)[::-1]
                    for mode in order:
                        seed = 1 + number
                        measure = await turn(drivers[mode], role, mode, batch, seed)
                        measures.append(measure)
                        print(
                            f"{role} {batch} {mode}: gap {measure.gap_ms:.2f} ms, "
                            f"{measure.tokens_per_s:.1f} tokens/s"
                        )
    return measures


def rows(measures: Sequence[Measure], role: str) -> list[list[str]]:
    """Table rows, one per batch: sync, async, and the ratios of the pairs in each round."""
    made = []
    for batch in sorted({m.batch for m in measures if m.role == role}):
        mine = [m for m in measures if (m.role, m.batch) == (role, batch)]
        sync, ahead = ([m for m in mine if m.mode == mode] for mode in MODES)
        row = [str(batch)]
        gaps = [a.gap_ms / s.gap_ms for s, a in zip(sync, ahead, strict=True) if s.gap_ms]
        speeds = [a.tokens_per_s / s.tokens_per_s for s, a in zip(sync, ahead, strict=True)]
        row.append(_beside([m.gap_ms for m in sync], [m.gap_ms for m in ahead], "ms"))
        row.append(_spread(gaps))
        row.append(_beside([m.tokens_per_s for m in sync], [m.tokens_per_s for m in ahead], ""))
        row.append(_spread(speeds))
        for q in (0.5, 0.99):
            both = [
                [1e3 * quantile(times, q)]
                if (times := sorted(t for m in mode for t in m.tpot_s))
                else []
                for mode in (sync, ahead)
            ]
            row.append(_beside(both[0], both[1], "ms"))
        steady = sum(m.steps["num_steady"] for m in ahead)
        overlapped = sum(m.steps["num_overlapped"] for m in ahead)
        row.append(f"{100 * overlapped / steady:.1f} % of {steady:.0f}" if steady else "-")
        made.append(row)
    return made


def _beside(sync: Sequence[float], ahead: Sequence[float], unit: str) -> str:
    values = [f"{statistics.median(each):.2f}" if each else "-" for each in (sync, ahead)]
    return f"{values[0]}, {values[1]} {unit}".strip()


def _spread(ratios: Sequence[float]) -> str:
    if not ratios:
        return "-"
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"


def parts(measures: Sequence[Measure], role: str) -> list[list[str]]:
    made = []
    for mode in MODES:
        for batch in sorted({m.batch for m in measures}):
            mine = [m for m in measures if (m.role, m.mode, m.batch) == (role, mode, batch)]
            if mine:
                medians = [statistics.median([m.step_ms[part] for m in mine]) for part in PARTS]
                made.append([f"{mode}, {batch}", *(f"{ms:.2f}" for ms in medians)])
    return made


HEAD: Final = (
    "batch",
    "gap",
    "async/sync",
    "tokens/s",
    "async/sync",
    "TPOT p50",
    "TPOT p99",
    "scheduled in time",
)


def as_markdown(measures: Sequence[Measure]) -> str:
    text = []
    for role in dict.fromkeys(m.role for m in measures):
        text += [f"## {role}", table(HEAD, rows(measures, role))]
        text += ["A step's parts, ms:", table(("engine, batch", *PARTS), parts(measures, role))]
    return "\n\n".join(text)


ABOUT: Final = (
    "SmolLM2-135M in fp32 on vLLM's CPU build, where an engine that schedules ahead has a process "
    "more. Each cell: sync, async, as medians of the rounds. A ratio is that of a round's two "
    "turns: median (least-most)."
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--roles", nargs="+", choices=list(ROLES), default=list(ROLES))
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--out", type=Path, help="writes OUT.md and OUT.json")
    args = parser.parse_args()
    measures = asyncio.run(run(args.roles, args.batches, args.rounds))
    text = as_markdown(measures)
    print(text)
    if args.out:
        found = [asdict(measure) for measure in measures]
        title = "Asynchronous scheduling on vLLM"
        write(args.out, "loadtests.engine.steps", title, ABOUT, text, measures=found)


if __name__ == "__main__":
    main()
