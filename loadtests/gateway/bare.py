"""Measures the engine without the mesh, as a baseline.

The program calls the same engine object that an instance hosts, with one request at a time. The
engine runs in its own process, as in an instance. The times of this baseline are subtracted from
those of the mesh.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import time
from array import array
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from pathlib import Path

from loadtests.gateway.scenarios import LOW_LOAD
from loadtests.harness.client import event_loop_factory
from loadtests.harness.generator import ROOT
from loadtests.harness.histogram import Histogram
from loadtests.harness.results import Bare
from pdmesh.engine.base import (
    Engine,
    Failed,
    Finished,
    Output,
    Prefilled,
    PrefillJob,
    Sampling,
    TokenBatch,
    Tokens,
)
from pdmesh.engine.factory import EngineSettings, build_engine

_NUM_PROMPTS = 64
_WARMUP_REQUESTS = 3


@dataclass(frozen=True, slots=True)
class BareSpec:
    engine: str
    model_dir: str
    num_prompt_tokens: int
    num_tokens: int  # the tokens of each answer
    duration_s: float


def measure_bare(spec: BareSpec) -> Bare:
    """Measure the bare engine in a child process.

    Raises CalledProcessError if the process fails.
    """
    done = subprocess.run(
        [sys.executable, "-m", "loadtests.gateway.bare", json.dumps(asdict(spec))],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    p50, p90, p99 = found["ttft_ms"]
    return Bare((p50, p90, p99), found["per_token_us"], found["num_requests"])


@dataclass(slots=True)
class _Seen:
    ttft: Histogram
    per_token: Histogram


async def drive(engine: Engine, spec: BareSpec) -> _Seen:
    """Send one request after the other until the time is over. The first few do not count."""
    seen = _Seen(Histogram(), Histogram())
    outputs = engine.outputs()
    prompts = _prompts(spec.num_prompt_tokens)
    until = time.perf_counter() + spec.duration_s
    leg = 0
    while time.perf_counter() < until or leg <= _WARMUP_REQUESTS:
        leg += 1
        await asyncio.sleep(LOW_LOAD.think_s)
        began = time.perf_counter()
        engine.prefill(_job(leg, prompts[leg % len(prompts)], spec.num_tokens))
        first_at, num_tokens = await _wait_for_end(outputs)
        if leg > _WARMUP_REQUESTS:
            seen.ttft.record(first_at - began)
            seen.per_token.record((time.perf_counter() - first_at) / max(num_tokens - 1, 1))
    return seen


async def _wait_for_end(outputs: AsyncIterator[list[Output]]) -> tuple[float, int]:
    """When the first token came, and how many tokens came."""
    first_at, num_tokens = 0.0, 0
    async for batch in outputs:
        for output in batch:
            match output:
                case Prefilled():
                    first_at, num_tokens = time.perf_counter(), 1
                    if output.finish_reason is not None:
                        return first_at, num_tokens
                case Tokens(token_ids=ids) | TokenBatch(token_ids=ids):
                    num_tokens += len(ids)
                case Finished():
                    return first_at, num_tokens
                case Failed(message=message):
                    raise RuntimeError(message)
    raise RuntimeError("the engine ended")


def _prompts(num_tokens: int) -> list[array[int]]:
    rng = random.Random(5)
    return [
        array("I", (rng.randrange(300, 400) for _ in range(num_tokens)))
        for _ in range(_NUM_PROMPTS)
    ]


def _job(leg: int, prompt: array[int], num_tokens: int) -> PrefillJob:
    sampling = Sampling(max_tokens=num_tokens, ignore_eos=True)
    return PrefillJob(
        leg=leg, request_id=f"bare-{leg}", attempt=0, prompt=prompt, sampling=sampling
    )


async def _run(spec: BareSpec) -> None:
    engine = _make_engine(spec)
    await engine.start()
    try:
        seen = await drive(engine, spec)
    finally:
        await engine.stop()
    quantiles = [round(seen.ttft.quantile(q) * 1e3, 4) for q in (0.5, 0.9, 0.99)]
    per_token_us = round(seen.per_token.quantile(0.5) * 1e6, 2)
    result = {"ttft_ms": quantiles, "per_token_us": per_token_us, "num_requests": seen.ttft.count}
    print(json.dumps(result))


def _make_engine(spec: BareSpec) -> Engine:
    return build_engine(
        EngineSettings(
            engine=spec.engine,
            instance_id="bare",
            incarnation=1,
            model="bare",
            model_dir=Path(spec.model_dir) if spec.model_dir else None,
            num_slots=8,
            block_size=64,
            max_model_len=4096,
            num_kv_blocks=0,
            staging_bytes=0,
            landing_bytes=0,
            max_retrievals=8,
            ticket_lease_s=10.0,
            sends_kv=True,
            receives_kv=True,
            sim_law="zero",
            sim_eos_period=0,
        )
    ).engine


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=event_loop_factory()) as runner:
        runner.run(_run(BareSpec(**json.loads(sys.argv[1]))))
