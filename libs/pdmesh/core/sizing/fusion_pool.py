"""Computes the TTFT and TPOT of fusion instances, which do prefill and decode on one engine.

A step computes a chunk of prompts together with one token of each running sequence. In such a mixed
step, every running sequence waits for the chunk. But the step reads the weights only once for both,
so the tokens of the sequences are cheap. Fusion has another cost: both phases queue for the same
engine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from pdmesh.core.instance.step_time_law import Law
from pdmesh.core.sizing.decode_pool import (
    BatchLoad,
    Contexts,
    NextTokens,
    averaged,
    no_tokens,
    running,
)
from pdmesh.core.sizing.prefill_pool import (
    FirstTokens,
    batch_extra_s,
    batch_size,
    mean_together,
    prompt_s,
)
from pdmesh.core.sizing.queueing import QueueWait, erlang_c, waiting
from pdmesh.core.sizing.traffic import RequestLengths, Traffic, mean

# With n instances, the variance of the prompts that each instance gets falls as n to this power. In
# simulations, the power is between 1/2 and 1.
_EVENNESS: Final = 2 / 3


@dataclass(frozen=True, slots=True)
class FusedTimes:
    """The times of the first token and of the next tokens.

    `mixed` is the share of time in steps that include prompts.
    """

    first: FirstTokens
    next: NextTokens
    mixed: float


@dataclass(frozen=True, slots=True)
class _Prompts:
    """The prompts of one instance.

    `times` and `chunks` have the compute time and the number of steps of each sampled prompt.
    """

    times: tuple[float, ...]
    chunks: tuple[float, ...]
    rate_per_s: float
    mean_s: float
    mean_chunks: float


@dataclass(frozen=True, slots=True)
class FusionEngines:
    """`count` engines. Each runs up to `most` sequences together with chunks of prompts."""

    law: Law
    count: int
    most: int
    chunk: int


def fused_times(
    engines: FusionEngines, traffic: Traffic, held: Contexts, base_s: float
) -> FusedTimes:
    law, requests = engines.law, traffic.requests
    steps = mean([r.num_steps for r in requests])
    together = mean_together(requests, engines.chunk)
    prompts = _prompts(law, requests, engines.chunk, traffic.rate_per_s / engines.count)
    size = 1.0
    for _ in range(3):  # prompts that share a step cause fewer mixed steps, which changes `size`
        shared = _sharing(law, prompts, size)
        step_s = [_token_s(law, shared, n, held) for n in range(engines.most + 1)]
        found = running(traffic.rate_per_s, steps, step_s, engines.count, engines.most)
        own = _own_s(law, found.mean, held)
        busy = shared.rate_per_s * (shared.mean_s + own * shared.mean_chunks)
        size = batch_size(engines.count, min(busy, 0.999), together)
    services = tuple(t + own * k for t, k in zip(shared.times, shared.chunks, strict=True))
    # A new prompt waits for the end of the step under way: half a step on average.
    rest = law.step_s(found.mean, found.mean * held.mean) / 2 if found.mean >= 1 else 0.0
    first = _first(traffic, engines, services, busy, base_s + rest)
    return FusedTimes(first, _next(engines, traffic, shared, found, held, first), busy)


def _prompts(
    law: Law, requests: Sequence[RequestLengths], chunk: int, rate_per_s: float
) -> _Prompts:
    times = tuple(prompt_s(law, r, chunk) for r in requests)
    chunks = tuple(float(-(-r.num_new // chunk)) for r in requests)
    return _Prompts(times, chunks, rate_per_s, mean(times), mean(chunks))


def _sharing(law: Law, prompts: _Prompts, size: float) -> _Prompts:
    if size <= 1:
        return prompts
    saved_s, saved = law.prefill_fixed_s * (1 - 1 / size), 1 - 1 / size
    return _Prompts(
        tuple(t - saved_s for t in prompts.times),
        tuple(k - saved for k in prompts.chunks),
        prompts.rate_per_s,
        prompts.mean_s - saved_s,
        prompts.mean_chunks - saved,
    )


def _own_s(law: Law, batch: float, held: Contexts) -> float:
    """The time that the running sequences add to a step that computes prompts."""
    if batch <= 0:
        return 0.0
    step = law.step_s(batch, batch * held.mean)
    return step - law.read_s(batch) if law.reads_once else step


def _token_s(law: Law, prompts: _Prompts, batch: int, held: Contexts) -> float:
    """The mean time per token of sequences that run beside prompts.

    Computing the prompts takes a certain share of the time. Each mixed step also yields a token of
    every sequence, and is longer only by the time that the sequences add. All other tokens need
    whole decode steps.
    """
    batch = max(batch, 1)
    step = law.step_s(batch, batch * held.mean)
    saved = law.read_s(batch) if law.reads_once else 0.0
    computing = prompts.rate_per_s * prompts.mean_s
    free = 1 - computing + prompts.rate_per_s * prompts.mean_chunks * saved
    all_mixed = prompts.mean_s / prompts.mean_chunks + step - saved
    # The time cannot be longer than if every step computed prompts.
    return min(step / free, all_mixed) if computing < 1 and free > 0 else all_mixed


def _first(
    traffic: Traffic,
    engines: FusionEngines,
    services: tuple[float, ...],
    busy: float,
    base_s: float,
) -> FirstTokens:
    if busy >= 1:
        return FirstTokens(QueueWait(1.0, math.inf), services, base_s, busy)
    wait = waiting(engines.count, traffic.rate_per_s, services, traffic.arrival_cv2)
    together = mean_together(traffic.requests, engines.chunk)
    extra = batch_extra_s(mean(services), engines.count, busy, together)
    return FirstTokens(QueueWait(wait.probability, wait.mean_s + extra), services, base_s, busy)


def _next(
    engines: FusionEngines,
    traffic: Traffic,
    prompts: _Prompts,
    found: BatchLoad,
    held: Contexts,
    first: FirstTokens,
) -> NextTokens:
    law, requests, batch = engines.law, traffic.requests, found.mean
    steps = mean([r.num_steps for r in requests])
    if engines.most < 1 or not steps:
        return no_tokens(engines.most, steps)
    middle = batch * engines.count / (traffic.rate_per_s * steps)
    slower = middle / law.step_s(max(batch, 1), max(batch, 1) * held.mean)
    slope = (law.step_sequence_s + law.step_context_s * held.mean) * slower
    variance = found.variance * slope**2
    variance += batch * held.variance * (law.step_context_s * slower) ** 2
    # The second and third moments of the work that prompts bring while an answer is written, per
    # second of a busy period. The master spreads prompts evenly.
    spread = prompts.rate_per_s / engines.count**_EVENNESS
    square = spread * mean([t**2 for t in prompts.times]) * slower**2
    cube = spread * mean([t**3 for t in prompts.times]) * slower**3
    # Prompts that queue behind a request's own prompt are computed while its answer begins.
    behind = _join_share(engines.count, first.busy) * prompts.rate_per_s * slower
    waited = first.wait.probability * first.wait.mean_s if first.busy < 1 else 0.0
    deviations, skews, extra = list[float](), list[float](), list[float]()
    for request, service in zip(requests, first.services, strict=True):
        num = max(request.num_steps, 1)
        before_s = waited + service
        extra.append(behind * prompts.mean_s * before_s / num)
        exposed = middle / num + behind * before_s / num**2 / (spread * slower)
        own = variance * averaged(request.num_steps / steps) + square * exposed
        deviations.append(math.sqrt(own))
        skews.append(cube * exposed / num / own**1.5 if own > 0 else 0.0)
    slowest = _slowest_s(law, prompts, engines.chunk, batch + 2 * math.sqrt(found.variance), held)
    return NextTokens(
        middle,
        tuple(deviations),
        tuple(skews),
        tuple(extra),
        batch,
        found.full,
        engines.most,
        max(middle, slowest),
    )


def _slowest_s(law: Law, prompts: _Prompts, chunk: int, batch: float, held: Contexts) -> float:
    """The time of a step with a full chunk of prompts. No mean time per token is longer.

    Chunks of long prompts take longer, and an answer waits for several chunks. So the chunk's time
    is at least the P90 of the chunks' times.
    """
    each = sorted((t / k, k) for t, k in zip(prompts.times, prompts.chunks, strict=True))
    left = 0.9 * sum(prompts.chunks)
    chunk_s = law.prefill_s(chunk)
    for seconds, chunks in each:
        if (left := left - chunks) <= 0:
            chunk_s = max(chunk_s, seconds)
            break
    return law.mixed_s(chunk_s, batch, batch * held.mean)


def _join_share(count: int, busy: float) -> float:
    """The share of prompts that queue behind a given prompt, because they find all engines
    in use.
    """
    return erlang_c(count, busy) / busy if 0 < busy < 1 else 1.0
