"""Our score: the second in which a request would have its first token, and what it costs others
(S93, S107, S108).

The unit of every term is a second, so that no weight has to say what a block is worth beside a
slot: the wait for the prompts before it, the fetch of what peers give, the compute of the rest.
A second of compute is also a second that later requests wait, or that their blocks are gone; the
few constants of `Prices` say how much of that counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from pdmesh.core.placement.instance import WORK_S, Instance
from pdmesh.core.placement.policies import Known, Query

_MOST_USED: Final = 0.9  # beyond that share of its time, an instance is as good as full


@dataclass(frozen=True, slots=True)
class Prices:
    """What a placement costs requests to come, in seconds per second.

    future: a second of compute, times used / (1 - used) time of the instances; eviction: a second
    of compute whose blocks push others out of a full cache; balance: a second of work that the
    instance has done lately beyond the least busy one; chat: a discount where the chat's last turn
    was, in the time of the whole prompt; adapter_s: the time to load an adapter.
    """

    future: float = 1.0
    eviction: float = 0.3
    balance: float = 0.02
    chat: float = 0.1
    adapter_s: float = 0.3


@dataclass(frozen=True, slots=True)
class ExpectedCompletion:
    """Scores are negative seconds."""

    prices: Prices = field(default_factory=Prices)

    def __call__(self, query: Query, instances: Sequence[Instance], known: Known) -> list[float]:
        now, prices = known.now, self.prices
        works = [instance.recent_work_s(now) for instance in instances]
        least = min(works, default=0.0)
        used = min(_MOST_USED, sum(works) / (WORK_S * max(1, len(works))))
        price = 1.0 + prices.future * used / (1 - used)
        times = _Times(query, known)
        costs: list[float] = []
        num_full = 0
        for instance, work in zip(instances, works, strict=True):
            local = known.matches.get(instance.id, 0)
            seconds = times.of(instance, local)
            cost = seconds * (price + prices.eviction * _evicted_share(query, instance, local, known))
            doubt = known.predictor.fit(instance.kind).error
            cost += instance.wait_s(now, doubt) + prices.balance * (work - least)
            if query.adapter and query.adapter not in instance.identity.adapters:
                cost += prices.adapter_s
            costs.append(cost)
            num_full += instance.used_slots() >= instance.num_slots
        if known.affine:
            self._prefer_home(query, instances, known, costs)
        if 0 < num_full < len(costs):
            _put_last(instances, costs)
        return [-cost for cost in costs]

    def _prefer_home(
        self, query: Query, instances: Sequence[Instance], known: Known, costs: list[float]
    ) -> None:
        for i, instance in enumerate(instances):
            if instance.id in known.affine:
                whole_s = known.predictor.fit(instance.kind).predict_s(query.num_prompt_tokens, 0)
                costs[i] = max(0.0, costs[i] - self.prices.chat * whole_s)


class _Times:
    """Predicted seconds of one query, remembered for instances that are alike."""

    def __init__(self, query: Query, known: Known) -> None:
        self._query, self._known = query, known
        self._reach = known.peers.reach if known.peers.runs else None
        self._seen: dict[tuple[str, int, bool, int], float] = {}

    def of(self, instance: Instance, local: int) -> float:
        is_queued = instance.available_at > self._known.now
        beside = instance.num_beside
        held = local
        if self._reach is not None and instance.identity.fetches_from_peers:
            held = max(local, self._reach(local))
        key = (instance.kind, local if held == local else -1 - local, is_queued, beside.bit_length())
        seconds = self._seen.get(key)
        if seconds is None:
            num_tokens, size = self._query.num_prompt_tokens, instance.identity.block_size
            seconds = self._seen[key] = self._known.predictor.fit(instance.kind).predict_s(
                num_tokens,
                min(held * size, max(0, num_tokens - 1)),
                num_fetched=(held - local) * size,
                num_beside=beside,
                is_queued=is_queued,
            )
        return seconds * instance.slowness


def _evicted_share(query: Query, instance: Instance, local: int, known: Known) -> float:
    """The share of its new blocks for which a full cache must evict others."""
    num_new = len(query.block_hashes) - local
    if num_new <= 0:
        return 0.0
    num_over = known.num_cached(instance.id) + num_new - instance.identity.num_kv_blocks
    return min(1.0, max(0.0, num_over / num_new))


def _put_last(instances: Sequence[Instance], costs: list[float]) -> None:
    """Full instances, which will refuse, behind all with a slot."""
    highest = max(costs)
    for i, instance in enumerate(instances):
        if instance.used_slots() >= instance.num_slots:
            costs[i] += highest + 1.0
