"""What vLLM's order by priority costs and gains (S83).

The cost is measured with requests of equal priority. The gain is how much sooner urgent requests
are served beside a batch's prompts.

    python -m loadtests.engine.priorities        needs vLLM and the prepared model (make model)

Two engines answer the same prompts in turn. One orders requests by priority, and the other by
arrival (fcfs). The engine that waits for its turn is idle. For the cost, the benchmark measures the
time to schedule a step, and tokens per second. For the gain, urgent prompts come after the prompts
of a batch. The time until their first token is compared with the time for the same prompts alone.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from loadtests.engine.steps import Driver, config_of, driven
from loadtests.gateway.report import table
from loadtests.harness.results import write
from pdmesh.core.instance.urgency import SchedulingPolicy

POLICIES: Final = (SchedulingPolicy.FCFS, SchedulingPolicy.PRIORITY)
BATCHES: Final = (8, 32)
URGENT, BATCH = 0, 3
NUM_URGENT, NUM_BATCH = 4, 8
EQUAL_TOKENS, EQUAL_ANSWER = (16, 300), (48, 12)  # requests alternate between these two lengths
URGENT_TOKENS, BATCH_TOKENS = 64, 800


@dataclass(frozen=True, slots=True)
class Cost:
    policy: str
    batch: int
    tokens_per_s: float
    schedule_ms: float  # per step


@dataclass(frozen=True, slots=True)
class Gain:
    """Median seconds until the first token, by kind of prompt.

    `alone_s` is for urgent prompts without a batch.
    """

    policy: str
    urgent_s: float
    alone_s: float
    batch_s: float


def drawn(rng: random.Random, num_tokens: int) -> list[int]:
    return rng.choices(range(1000, 40000), k=num_tokens)


async def cost(driver: Driver, policy: str, batch: int, seed: int) -> Cost:
    rng = random.Random(seed)
    prompts = [(drawn(rng, EQUAL_TOKENS[n % 2]), EQUAL_ANSWER[n % 2]) for n in range(batch)]
    before, began = driver.counts(), time.perf_counter()
    times = await driver.answer(prompts)
    wall_s = time.perf_counter() - began
    await asyncio.sleep(0.3)  # the engine reports a step's counts later than its tokens
    after = driver.counts()
    num_steps, schedule_s = (after[name] - before[name] for name in ("num_steps", "schedule_s"))
    return Cost(
        policy, batch, sum(map(len, times)) / wall_s, 1e3 * schedule_s / max(1.0, num_steps)
    )


async def gain(driver: Driver, policy: str, seed: int) -> Gain:
    rng = random.Random(seed)
    alone = await _first_tokens_s(driver, [(URGENT_TOKENS, URGENT)] * NUM_URGENT, rng)
    mixed = [(BATCH_TOKENS, BATCH)] * NUM_BATCH + [(URGENT_TOKENS, URGENT)] * NUM_URGENT
    beside = await _first_tokens_s(driver, mixed, rng)
    urgent, batch = beside[NUM_BATCH:], beside[:NUM_BATCH]
    return Gain(policy, *(statistics.median(each) for each in (urgent, alone, batch)))


async def _first_tokens_s(
    driver: Driver, asked: Sequence[tuple[int, int]], rng: random.Random
) -> list[float]:
    prompts = [(drawn(rng, num_tokens), 1) for num_tokens, _ in asked]
    began = time.perf_counter()
    times = await driver.answer(prompts, [priority for _, priority in asked])
    return [each[0] - began for each in times]


async def run(rounds: int) -> tuple[list[Cost], list[Gain]]:
    costs, gains = list[Cost](), list[Gain]()
    async with AsyncExitStack() as engines:
        drivers: Mapping[str, Driver] = {
            policy: await engines.enter_async_context(
                driven(replace(config_of("fusion", "sync"), scheduling_policy=policy))
            )
            for policy in POLICIES
        }
        for policy, driver in drivers.items():
            await cost(driver, policy, max(BATCHES), seed=0)  # warm-up
        for number in range(1, rounds + 1):
            order = list(drivers) if number % 2 else list(drivers)[::-1]
            for batch in BATCHES:
                costs += [await cost(drivers[policy], policy, batch, number) for policy in order]
            gains += [await gain(drivers[policy], policy, number) for policy in order]
            print(f"round {number}: {costs[-2:]}, {gains[-2:]}")
    return costs, gains


def as_markdown(costs: Sequence[Cost], gains: Sequence[Gain]) -> str:
    rows = []
    for batch in BATCHES:
        fcfs, urgent = (
            [c for c in costs if (c.policy, c.batch) == (policy, batch)] for policy in POLICIES
        )
        speeds = [u.tokens_per_s / f.tokens_per_s for f, u in zip(fcfs, urgent, strict=True)]
        rows.append(
            (
                str(batch),
                *(
                    f"{statistics.median(c.tokens_per_s for c in each):.1f}"
                    for each in (fcfs, urgent)
                ),
                f"{statistics.median(speeds):.2f} ({min(speeds):.2f}-{max(speeds):.2f})",
                *(
                    f"{statistics.median(c.schedule_ms for c in each):.2f}"
                    for each in (fcfs, urgent)
                ),
            )
        )
    head = ("batch", "tokens/s, fcfs", "by priority", "ratio", "schedule ms, fcfs", "by priority")
    firsts = []
    for policy in POLICIES:
        mine = [g for g in gains if g.policy == policy]
        slower = [g.urgent_s / g.alone_s for g in mine]
        firsts.append(
            (
                policy.value,
                f"{statistics.median(g.urgent_s for g in mine):.2f} s",
                f"{statistics.median(slower):.1f} ({min(slower):.1f}-{max(slower):.1f})",
                f"{statistics.median(g.batch_s for g in mine):.2f} s",
            )
        )
    told = ("engine", "urgent TTFT", "relative to urgent alone", "batch TTFT")
    return f"## One priority\n\n{table(head, rows)}\n\n## Two\n\n{table(told, firsts)}"


ABOUT: Final = (
    "SmolLM2-135M in fp32 on vLLM's CPU build, steps of 512 tokens. One priority: half of the "
    f"requests have prompts of {EQUAL_TOKENS[0]} tokens and long answers, half of "
    f"{EQUAL_TOKENS[1]}. Two: {NUM_BATCH} prompts of {BATCH_TOKENS} tokens, then {NUM_URGENT} "
    f"urgent ones of {URGENT_TOKENS}. Medians of the rounds; a ratio is that of a round's two "
    "turns: median (least-most)."
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="writes OUT.md and OUT.json")
    args = parser.parse_args()
    costs, gains = asyncio.run(run(args.rounds))
    text = as_markdown(costs, gains)
    print(text)
    if args.out:
        found = {
            "costs": [asdict(each) for each in costs],
            "gains": [asdict(each) for each in gains],
        }
        write(
            args.out,
            "loadtests.engine.priorities",
            "Order by priority on vLLM",
            ABOUT,
            text,
            **found,
        )


if __name__ == "__main__":
    main()
