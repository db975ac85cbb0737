"""Our placement score: minus the expected seconds until a request's first token, and minus the
request's cost for other requests (S93, S107, S108).

Every term is in seconds: the wait for earlier prompts, the fetch of KV from other instances, and
the compute of the rest of the prompt. So no weight has to compare a block with a slot. A second of
compute also delays later requests or evicts their blocks. `Prices` converts these costs to seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from pdmesh.core.placement.instance import USED_S, Instance
from pdmesh.core.placement.policies import Known, Query
from pdmesh.core.placement.shortlist import TypicalWork

_MOST_USED: Final = 0.9  # the used share of the instances' time is capped at this value
# The instances of a chat's last turn pay only this share of the balance price, so that new chats
# move to other instances first.
_HOME_SHARE: Final = 0.25


@dataclass(frozen=True, slots=True)
class Prices:
    """The costs of a placement for later requests.

    `future` and `eviction` are added for each second of predicted compute. `future` is multiplied
    by used / (1 - used), where `used` is the mean share of the instances' time in use. `eviction`
    is multiplied by the share of the new blocks for which a full cache must evict others.

    `balance` and `chat` are for each second that the whole prompt takes without reuse. `balance`
    is multiplied by work / (mean + prompt) - 1, if that is positive. Here `work` is the instance's
    recent and waiting work, `mean` is the mean work of all instances, and `prompt` is the time of
    this prompt. `chat` is a discount for the instances of the chat's last turn.

    `adapter_s` is the number of seconds to load an adapter.
    """

    future: float = 6.0
    eviction: float = 0.3
    balance: float = 10.0
    chat: float = 0.1
    adapter_s: float = 0.3


@dataclass(frozen=True, slots=True)
class ExpectedCompletion:
    """Scores instances in seconds. A score is a cost with a minus sign, so it is at most 0."""

    prices: Prices = field(default_factory=Prices)

    def __call__(self, query: Query, instances: Sequence[Instance], known: Known) -> list[float]:
        now, prices = known.now, self.prices
        count = max(1, len(instances))
        recent = [i.recent.at(now) for i in instances]
        used, even = _shares(instances, recent, known.typical)
        price = 1.0 + prices.future * used / (1 - used)
        times = _Times(query, known)
        costs: list[float] = []
        num_full = 0
        for instance, (_, balance) in zip(instances, recent, strict=True):
            work = balance + instance.backlog_s
            local = known.matches.get(instance.id, 0)
            seconds = times.of(instance, local)
            evicted = _evicted_share(query, instance, local, known)
            cost = seconds * (price + prices.eviction * evicted)
            cost += instance.wait_s(now, known.predictor.fit(instance.kind).doubt)
            spare = even + times.whole_s(instance)
            if work > spare:
                share = _HOME_SHARE if instance.id in known.affine else 1.0
                cost += share * prices.balance * (work / spare - 1) * times.whole_s(instance)
            if query.adapter and query.adapter not in instance.identity.adapters:
                cost += prices.adapter_s
            costs.append(cost)
            num_full += instance.used_slots() >= instance.num_slots
        if known.affine:
            self._prefer_home(times, instances, known, costs)
        if 0 < num_full < count:
            _put_last(instances, costs)
        return [-cost for cost in costs]

    def _prefer_home(
        self, times: _Times, instances: Sequence[Instance], known: Known, costs: list[float]
    ) -> None:
        for i, instance in enumerate(instances):
            if instance.id in known.affine:
                costs[i] = max(0.0, costs[i] - self.prices.chat * times.whole_s(instance))


def _shares(
    instances: Sequence[Instance],
    recent: Sequence[tuple[float, float]],
    typical: TypicalWork | None,
) -> tuple[float, float]:
    """Two means over the instances: the used share of their time, and their recent work in seconds.

    The recent work decays with the time `BALANCE_S`. The backlog is added to both values.
    """
    if typical is not None:
        used_s, even = typical.used_s + typical.backlog_s, typical.balance_s + typical.backlog_s
    else:
        count, backlog_s = max(1, len(instances)), sum(i.backlog_s for i in instances)
        used_s = (sum(u for u, _ in recent) + backlog_s) / count
        even = (sum(b for _, b in recent) + backlog_s) / count
    return min(_MOST_USED, used_s / USED_S), even


class _Times:
    """Predicts the prefill time of one query, and caches it for similar instances."""

    def __init__(self, query: Query, known: Known) -> None:
        self._query, self._known = query, known
        self._reach = known.peers.reach if known.peers.runs else None
        self._seen: dict[tuple[str, int, bool, int], float] = {}
        self._whole: dict[str, float] = {}

    def of(self, instance: Instance, local: int) -> float:
        is_queued = instance.available_at > self._known.now
        beside = instance.num_beside
        held = local
        if self._reach is not None and instance.identity.fetches_from_peers:
            held = max(local, self._reach(local))
        key = (
            instance.kind,
            local if held == local else -1 - local,
            is_queued,
            beside.bit_length(),
        )
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

    def whole_s(self, instance: Instance) -> float:
        """The predicted seconds for the prompt without any reuse."""
        kind = instance.kind
        if kind not in self._whole:
            num_tokens = self._query.num_prompt_tokens
            self._whole[kind] = self._known.predictor.fit(kind).predict_s(num_tokens, 0)
        return self._whole[kind] * instance.slowness


def _evicted_share(query: Query, instance: Instance, local: int, known: Known) -> float:
    """The share of the query's new blocks for which the instance's cache must evict others."""
    num_new = len(query.block_hashes) - local
    if num_new <= 0:
        return 0.0
    num_over = known.num_cached(instance.id) + num_new - instance.identity.num_kv_blocks
    return min(1.0, max(0.0, num_over / num_new))


def _put_last(instances: Sequence[Instance], costs: list[float]) -> None:
    """Put full instances, which will reject the request, behind all that have a free slot."""
    highest = max(costs)
    for i, instance in enumerate(instances):
        if instance.used_slots() >= instance.num_slots:
            costs[i] += highest + 1.0
