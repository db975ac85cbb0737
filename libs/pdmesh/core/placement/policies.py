"""What all placement policies share: a query, what is known about its candidates, and how they are
picked by score (S94, S108).

A policy scores all candidates of one query at once, since some scores are relative to the others.
Ours is in `expected_completion.py`, the others in `baselines.py`. All have the same interface and
are selected by name.
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

# Scores within this share of the best count as equal, and are taken in random order.
_TIE: Final = 0.03
_EPSILON: Final = 1e-9
_TO_LOAD: Final = 8.0
MOST_SCORED: Final = 96  # prefills, and as many decodes; if there are no more, all are scored


@dataclass(frozen=True, slots=True)
class Query:
    """One request to place: lengths and hashes, never its text."""

    model: str = ""
    scenario: str = ""
    block_hashes: Sequence[bytes] = ()
    num_prompt_tokens: int = 0
    max_tokens: int = 1
    chat_id: str = ""
    excluded: frozenset[str] = frozenset()
    request_id: str = ""  # settles its bookings; empty: they expire
    region: str = ""  # where the request came in: instances there are preferred
    adapter: str = ""  # digest of the LoRA adapter that it wants; empty: the model itself
    has_images: bool = False

    def num_blocks(self, instance: Instance) -> int:
        """KV blocks that prompt and output may need, within the model's length."""
        identity = instance.identity
        num_tokens = self.num_prompt_tokens + self.max_tokens
        if identity.max_model_len:
            num_tokens = min(num_tokens, identity.max_model_len)
        return -(-num_tokens // max(1, identity.block_size))


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of the terms of `weighted_sum.py`, which is formula (2) of the paper.

    alpha: the prefix that the instance holds itself; beta: the prefix that it could fetch from a
    peer; gamma: predicted latency; load: the share of its slots in use; chat: it served this chat's
    last turn; spread: the share of its cache in use, times the share of the prompt that it does not
    hold; adapter: it has loaded the LoRA adapter.
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
    """What is known about the candidates of one query.

    `matches`: how many contiguous blocks each candidate holds. `peers`: which of the prompt's
    blocks host pools can give to an instance that fetches from peers. `typical`: the work of the
    mean instance, where only a shortlist is scored; None: that of the candidates.
    """

    matches: Mapping[str, int]
    predictor: LatencyPredictor
    weights: Weights
    now: float
    affine: Sequence[str] = ()
    peers: PeerRuns = NO_PEERS
    num_cached: Callable[[str], int] = lambda instance_id: 0  # all blocks that an instance holds
    typical: TypicalWork | None = None


@dataclass(frozen=True, slots=True)
class Scored:
    """Higher is better; scores are comparable only within one plan."""

    instance: Instance
    score: float


ScorePrefills = Callable[[Query, Sequence[Instance], Known], Sequence[float]]
ScoreDecodes = Callable[[Query, Sequence[Instance]], Sequence[float]]
Pick = Callable[[Sequence[Scored], random.Random, int], list[Scored]]


@dataclass(frozen=True, slots=True)
class Policy:
    """How prefills and decodes are scored and picked, in the order in which they are offered.

    `most_scored`: of more prefills or decodes, only a shortlist is scored; 0: all are.
    """

    name: str
    score_prefills: ScorePrefills
    pick_prefill: Pick
    score_decodes: ScoreDecodes
    pick_decode: Pick
    most_scored: int = 0


def free_capacity(query: Query, instances: Sequence[Instance]) -> list[float]:
    """The share of KV that stays free times the share of free slots.

    It is tiny but positive when nothing is free. Decodes of one cell have blocks of one size. A
    decode that must load the query's adapter first gets only a part of this score. So an adapter in
    great demand spreads over all decodes, and other adapters stay where they are.
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
    """Sort by score. Scores within 3 % of the best are shuffled, so that gateways do not herd."""
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
    """A random order: each place goes to one of the remaining instances, in proportion to score.

    The method is that of Efraimidis and Spirakis.
    """
    draw, log = rng.random, math.log
    keyed = [(log(1.0 - draw()) / max(_EPSILON, s.score), i) for i, s in enumerate(scored)]
    return [scored[i] for _, i in heapq.nlargest(count, keyed)]


@dataclass(slots=True)
class InTurn:
    """Round robin: each instance in its turn, whatever the scores."""

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
