"""Baselines for our placement policy, and the list of all policies by name (S6, S7).

A policy scores the instances that may serve a request. All policies get the same data about
instances and cached prefixes, so that measurements compare only their rules.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from pdmesh.core.placement.expected_completion import ExpectedCompletion, Prices
from pdmesh.core.placement.instance import Instance
from pdmesh.core.placement.policies import (
    MOST_SCORED,
    InTurn,
    Known,
    Policy,
    Query,
    Scored,
    best_first,
    free_capacity,
    weighted_random,
)
from pdmesh.core.placement.weighted_sum import prefix_and_latency

_REPORT_S: Final = 0.1
_MATCH_THRESHOLD: Final = 0.5  # a match of more than this share decides in `cache_aware`
_IMBALANCE_ABS: Final = 32
_IMBALANCE_REL: Final = 1.1


def constant_prefills(query: Query, instances: Sequence[Instance], known: Known) -> list[float]:
    return [0.0] * len(instances)


def fewest_used_prefills(query: Query, instances: Sequence[Instance], known: Known) -> list[float]:
    """Least connections, as in most load balancers."""
    return [-float(i.used_slots()) for i in instances]


def constant_decodes(query: Query, instances: Sequence[Instance]) -> list[float]:
    return [0.0] * len(instances)


def fewest_used_decodes(query: Query, instances: Sequence[Instance]) -> list[float]:
    return [-float(i.used_slots()) for i in instances]


def fewest_blocks_decodes(query: Query, instances: Sequence[Instance]) -> list[float]:
    """Prefer the fewest active KV blocks, which is the decode part of a KV router's cost."""
    return [float(i.free_blocks() - i.identity.num_kv_blocks) for i in instances]


@dataclass(slots=True)
class ShortestQueue:
    """Prefers the fewest waiting prompt blocks, from a report that is up to `period_s` old (S7).

    Within a period the report does not change, so all requests go to the same instances.
    """

    period_s: float = _REPORT_S
    _reported_at: float = float("-inf")
    _queues: dict[str, int] = field(default_factory=dict)

    def __call__(self, query: Query, instances: Sequence[Instance], known: Known) -> list[float]:
        if known.now - self._reported_at >= self.period_s:
            self._reported_at = known.now
            self._queues = {i.id: i.num_backlog_blocks for i in instances}
        return [-float(self._queues.get(i.id, 0)) for i in instances]


def cache_aware(query: Query, instances: Sequence[Instance], known: Known) -> list[float]:
    """The rule of SGLang's gateway.

    If the loads differ a lot, the instance with the fewest used slots is best. Otherwise it is the
    instance with the longest cached prefix, if that covers most of the prompt. If not, it is the
    one with the emptiest cache.
    """
    used = [i.used_slots() for i in instances]
    lowest, highest = min(used), max(used)
    if highest - lowest > _IMBALANCE_ABS and highest > _IMBALANCE_REL * lowest:
        return [-float(u) for u in used]
    total = max(1, len(query.block_hashes))
    shares = [known.matches.get(i.id, 0) / total for i in instances]
    if max(shares) > _MATCH_THRESHOLD:
        return [share - 1e-3 * u for share, u in zip(shares, used, strict=True)]
    return [float(i.num_kv_blocks_free) for i in instances]


def block_cost(query: Query, instances: Sequence[Instance], known: Known) -> list[float]:
    """The rule of Dynamo's KV router, which chooses the least cost.

    The cost is the number of prompt blocks to compute, including waiting prompts, plus the number
    of active blocks, including this prompt's.
    """
    total = len(query.block_hashes)
    scores = []
    for instance in instances:
        overlap = known.matches.get(instance.id, 0)
        prefill = max(0, instance.num_backlog_blocks + total - overlap)
        active = instance.identity.num_kv_blocks - instance.free_blocks()
        scores.append(-float(prefill + active + total))
    return scores


def lowest_cost(scored: Sequence[Scored], rng: random.Random, count: int) -> list[Scored]:
    """Sort strictly by score. Only equal scores are in random order."""
    shuffled = list(scored)
    rng.shuffle(shuffled)
    return sorted(shuffled, key=lambda s: -s.score)[:count]


def default(prices: Prices | None = None) -> Policy:
    return Policy(
        "default",
        ExpectedCompletion(prices or Prices()),
        best_first,
        free_capacity,
        weighted_random,
        MOST_SCORED,
    )


def weighted_sum() -> Policy:
    return Policy("weighted_sum", prefix_and_latency, best_first, free_capacity, weighted_random)


def round_robin() -> Policy:
    return Policy("round_robin", constant_prefills, InTurn(), constant_decodes, InTurn())


def least_connections() -> Policy:
    return Policy(
        "least_connections", fewest_used_prefills, best_first, fewest_used_decodes, best_first
    )


def shortest_queue() -> Policy:
    return Policy("shortest_queue", ShortestQueue(), best_first, fewest_used_decodes, best_first)


def mixed_pool() -> Policy:
    """A random choice, as in a pool of prefills that ignores cached prefixes (S6)."""
    return Policy("mixed_pool", constant_prefills, best_first, constant_decodes, best_first)


def cache_threshold() -> Policy:
    return Policy("cache_threshold", cache_aware, best_first, fewest_used_decodes, best_first)


def kv_router() -> Policy:
    return Policy("kv_router", block_cost, lowest_cost, fewest_blocks_decodes, lowest_cost)


POLICIES: Final[dict[str, Callable[[], Policy]]] = {
    "default": default,
    "round_robin": round_robin,
    "least_connections": least_connections,
    "shortest_queue": shortest_queue,
    "mixed_pool": mixed_pool,
    "cache_threshold": cache_threshold,
    "kv_router": kv_router,
    "weighted_sum": weighted_sum,
}
