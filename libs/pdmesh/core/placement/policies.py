"""The common interface of all placement policies (S94, S108).

A policy scores the instances that may serve a request, and picks candidates by score. It scores all
instances of one query at once, because some scores are relative to the others. The default policy
is in `expected_completion.py`. The policies it is compared with are in `baselines.py`, which also
lists all policies by name.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from pdmesh.core.kv.prefix.prefix_index import NO_PEERS, PeerRuns
from pdmesh.core.placement.instance import Instance
from pdmesh.core.placement.predictor import LatencyPredictor
from pdmesh.core.placement.shortlist import TypicalWork

# Scores within this share of the best count as equal, and their instances are in random order.
_TIE: Final = 0.03
_EPSILON: Final = 1e-9
_TO_LOAD: Final = 8.0  # a decode that must load the adapter first has its score divided by this
MOST_SCORED: Final = 96  # per role; if there are more instances, only a shortlist is scored


@dataclass(frozen=True, slots=True)
class Query:
    """One request to place, described by lengths and hashes and without its text."""

    model: str = ""
    scenario: str = ""
    block_hashes: Sequence[bytes] = ()
    num_prompt_tokens: int = 0
    max_tokens: int = 1
    chat_id: str = ""
    excluded: frozenset[str] = frozenset()
    request_id: str = ""  # load reports name it; then the request no longer counts as booked load
    region: str = ""  # of the gateway that received the request; instances there are preferred
    adapter: str = ""  # digest of the LoRA adapter, or empty for the model itself
    has_images: bool = False

    def num_blocks(self, instance: Instance) -> int:
        """How many KV blocks prompt and output need at most, limited by the model's length."""
        identity = instance.identity
        num_tokens = self.num_prompt_tokens + self.max_tokens
        if identity.max_model_len:
            num_tokens = min(num_tokens, identity.max_model_len)
        return -(-num_tokens // max(1, identity.block_size))


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of the terms of `weighted_sum.py`, which is formula (2) of the paper.

    `alpha` weighs the share of the prompt whose KV the instance holds, and `beta` the share that it
    could also fetch from other instances. `gamma` weighs the predicted latency, and `load` the
    share of slots in use. `chat` is added if the instance served the chat's last turn, and
    `adapter` if it has loaded the LoRA adapter. `spread` weighs the share of the cache in use,
    times the share of the prompt that the instance does not hold.
    """

    alpha: float = 1.0
    beta: float = 0.5
    gamma: float = 3.0
    load: float = 0.5
    chat: float = 0.2
    spread: float = 0.3
    adapter: float = 0.5


@dataclass(frozen=True, slots=True)
class Known:
    """The data about the candidates of one query.

    `matches` has, by instance, the number of blocks from the prompt's beginning whose KV it holds.
    `peers` has the blocks of the prompt that instances can fetch from the host memory of others.
    `affine` has the instances of the chat's last turn. `typical` is the work of the mean instance,
    if only a shortlist is scored. If it is None, the mean of the scored instances is used.
    """

    matches: Mapping[str, int]
    predictor: LatencyPredictor
    weights: Weights
    now: float
    affine: Sequence[str] = ()
    peers: PeerRuns = NO_PEERS
    num_cached: Callable[[str], int] = lambda instance_id: 0  # how many blocks an instance holds
    typical: TypicalWork | None = None


@dataclass(frozen=True, slots=True)
class Scored:
    """A scored instance. Higher is better. Scores are comparable only within one plan."""

    instance: Instance
    score: float


ScorePrefills = Callable[[Query, Sequence[Instance], Known], Sequence[float]]
ScoreDecodes = Callable[[Query, Sequence[Instance]], Sequence[float]]
Pick = Callable[[Sequence[Scored], random.Random, int], list[Scored]]


@dataclass(frozen=True, slots=True)
class Policy:
    """How prefills and decodes are scored, and how candidates are picked by score, best first.

    If there are more than `most_scored` prefills or decodes, only a shortlist is scored. 0 means
    that all are scored.
    """

    name: str
    score_prefills: ScorePrefills
    pick_prefill: Pick
    score_decodes: ScoreDecodes
    pick_decode: Pick
    most_scored: int = 0


def free_capacity(query: Query, instances: Sequence[Instance]) -> list[float]:
    """Score decodes by the share of KV that stays free times the share of free slots.

    The score is tiny but positive if nothing is free. A decode that must load the query's adapter
    first gets only a part of this score. So an adapter in great demand spreads over all decodes,
    and other adapters stay where they are. All `instances` must have blocks of one size.
    """
    num_blocks = query.num_blocks(instances[0])
    scores = []
    for instance in instances:
        free = instance.num_kv_blocks_free - instance.num_booked_blocks - num_blocks
        used = instance.num_slots_used + instance.num_booked
        slots, blocks = instance.num_slots or 1, instance.identity.num_kv_blocks or 1
        is_full = free <= 0 or used >= slots
        score = _EPSILON if is_full else min(1.0, free / blocks) * (1.0 - used / slots)
        if query.adapter and query.adapter not in instance.identity.adapters:
            score /= _TO_LOAD
        scores.append(score)
    return scores


def best_first(scored: Sequence[Scored], rng: random.Random, count: int) -> list[Scored]:
    """Sort by score, best first.

    Instances whose scores are within 3 % of the best are shuffled, so that requests of several
    gateways do not all go to the same instance.
    """
    if not scored:
        return []
    best = max(s.score for s in scored)
    threshold = best - _TIE * abs(best) - _EPSILON
    tied = [s for s in scored if s.score >= threshold]
    rng.shuffle(tied)
    if len(tied) >= count:
        return tied[:count]
    rest = heapq.nlargest(count - len(tied), (s for s in scored if s.score < threshold), key=_score)
    return tied + rest


def _score(scored: Scored) -> float:
    return scored.score


def weighted_random(scored: Sequence[Scored], rng: random.Random, count: int) -> list[Scored]:
    """Draw `count` instances without replacement, with probabilities in proportion to their scores.

    This is weighted sampling as described by Efraimidis and Spirakis.
    """
    draw, log = rng.random, math.log
    keyed = [(log(1.0 - draw()) / max(_EPSILON, s.score), i) for i, s in enumerate(scored)]
    return [scored[i] for _, i in heapq.nlargest(count, keyed)]


@dataclass(slots=True)
class InTurn:
    """Picks instances by round robin and ignores their scores."""

    _turns: dict[tuple[str, ...], int] = field(default_factory=dict)

    def __call__(self, scored: Sequence[Scored], rng: random.Random, count: int) -> list[Scored]:
        if not scored:
            return []
        key = tuple(s.instance.id for s in scored)
        if key not in self._turns and len(self._turns) >= 1024:
            self._turns.clear()
        turn = self._turns.get(key, 0)
        self._turns[key] = (turn + 1) % len(scored)
        return [*scored[turn:], *scored[:turn]][:count]
