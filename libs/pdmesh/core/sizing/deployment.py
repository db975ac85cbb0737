"""The deployments that a plan compares, and the latencies that their requests see."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from pdmesh.core.sizing.decode_pool import Contexts, NextTokens, contexts, next_tokens
from pdmesh.core.sizing.fusion_pool import FusionEngines, fused_times
from pdmesh.core.sizing.instance_kind import InstanceKind
from pdmesh.core.sizing.prefill_pool import FirstTokens, first_tokens
from pdmesh.core.sizing.traffic import BLOCK, Goals, Traffic, mean

PREFILL_CHUNK: Final = 8192
FUSION_CHUNKS: Final = (512, 2048, 8192)
HOP_S: Final = 0.0005  # one way between gateway, master and instances
BASE_S: Final = 4 * HOP_S  # before a first token: to the master and back, to the prefill and back
MAX_SLOTS: Final = 256  # the most slots of a decode or fusion instance
PREFILL_SLOTS: Final = 8  # the default of a prefill
MAX_LINK: Final = 0.7  # the network between prefills and decodes may be busy for this share of time


@dataclass(frozen=True, slots=True)
class PoolSize:
    """`count` instances of one role."""

    kind: InstanceKind
    count: int
    chunk: int = PREFILL_CHUNK
    slots: int = MAX_SLOTS

    @property
    def num_gpus(self) -> int:
        return self.kind.tp * self.count


@dataclass(frozen=True, slots=True)
class Seen:
    """The latencies that requests see.

    `ttft_s` and `tpot_s` are the quantiles for the share of requests that the goals name. `busy` is
    a share of time, 0 to 1. For P/D it is the time in which prefills compute. For fusion it is the
    time in steps that include prompts. `batch` is the mean number of sequences in one engine.
    """

    ttft_p50_s: float
    ttft_s: float
    tpot_p50_s: float
    tpot_s: float
    busy: float
    batch: float
    transfer_s: float = 0.0  # the mean transfer time of one prompt's KV


@dataclass(frozen=True, slots=True)
class Deployment:
    """A pool of prefills and a pool of decodes, or one pool of fusion instances, which do both."""

    pools: tuple[PoolSize, ...]  # (prefill, decode) or (fusion,)
    seen: Seen

    @property
    def is_fusion(self) -> bool:
        return len(self.pools) == 1

    @property
    def num_gpus(self) -> int:
        return sum(pool.num_gpus for pool in self.pools)

    def __str__(self) -> str:
        if self.is_fusion:
            return f"{self.pools[0].count} fusion"
        return f"{self.pools[0].count}P:{self.pools[1].count}D"


def held_by(traffic: Traffic) -> Contexts:
    return contexts(traffic.requests, BLOCK)


def most_running(kind: InstanceKind, held: Contexts) -> int:
    """How many sequences an instance has slots and KV for."""
    return min(MAX_SLOTS, int(kind.kv_tokens / held.reserved))


def prefill_times(pool: PoolSize, traffic: Traffic) -> FirstTokens:
    return first_tokens(pool.kind.law, traffic, pool.count, pool.chunk, BASE_S, PREFILL_SLOTS)


def transfer_times(sender: InstanceKind, receiver: InstanceKind, traffic: Traffic) -> list[float]:
    """The transfer time of each sampled prompt's KV on an otherwise idle link, in seconds."""
    rate = min(sender.network_bandwidth, receiver.network_bandwidth)
    return [r.num_prompt * sender.kv_token_bytes / rate for r in traffic.requests]


def link_busy(kind: InstanceKind, count: int, traffic: Traffic) -> float:
    """The busy share of the network of `count` instances that send or receive all KV."""
    moved = traffic.rate_per_s * traffic.mean_prompt * kind.kv_token_bytes
    return moved / (count * kind.network_bandwidth)


def decode_times(pool: PoolSize, sender: InstanceKind, traffic: Traffic) -> NextTokens:
    before = [2 * HOP_S + each for each in transfer_times(sender, pool.kind, traffic)]
    held = held_by(traffic)
    most = most_running(pool.kind, held)
    return next_tokens(pool.kind.law, traffic, pool.count, most, held, before)


def pair_of(prefill: PoolSize, decode: PoolSize, traffic: Traffic, goals: Goals) -> Deployment:
    first = prefill_times(prefill, traffic)
    following = decode_times(decode, prefill.kind, traffic)
    moved = mean(transfer_times(prefill.kind, decode.kind, traffic))
    return Deployment((prefill, decode), _seen(first, following, first.busy, goals, moved))


def fused(pool: PoolSize, traffic: Traffic, goals: Goals) -> Deployment:
    found = fused_of(pool, traffic)
    return Deployment((pool,), _seen(found[0], found[1], found[2], goals))


def fused_of(pool: PoolSize, traffic: Traffic) -> tuple[FirstTokens, NextTokens, float]:
    held = held_by(traffic)
    most = most_running(pool.kind, held)
    engines = FusionEngines(pool.kind.law, pool.count, most, pool.chunk)
    times = fused_times(engines, traffic, held, BASE_S)
    return times.first, times.next, times.mixed


def _seen(
    first: FirstTokens, following: NextTokens, busy: float, goals: Goals, moved_s: float = 0.0
) -> Seen:
    return Seen(
        first.quantile_s(0.5),
        first.quantile_s(goals.share),
        following.quantile_s(0.5),
        following.quantile_s(goals.share),
        busy,
        following.batch,
        moved_s,
    )


def slots_for(batch: float, most: int) -> int:
    """The slots of a decode or fusion instance, a multiple of 8 up to `most`.

    There are so many slots that they are seldom all in use. `batch` is the mean number of
    sequences.
    """
    if math.isinf(batch):
        return most
    wanted = batch + 4 * math.sqrt(batch) + 4
    return max(1, min(most, -(-math.ceil(wanted) // 8) * 8))
