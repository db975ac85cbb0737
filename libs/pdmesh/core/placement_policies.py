"""The scoring and picking functions of placement, and the named policies made of them.

A new policy is a function here and a line in POLICIES. `round_robin` and `least_connections` are the baselines we measure against.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from pdmesh.core.fleet import Instance

_TIE: Final = 0.1  # scores this close to the best, relative to it, count as equal
_EPSILON: Final = 1e-9


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

    def num_blocks(self, instance: Instance) -> int:
        """KV blocks that prompt and output may come to need, within the model's length."""
        identity = instance.identity
        num_tokens = self.num_prompt_tokens + self.max_tokens
        if identity.max_model_len:
            num_tokens = min(num_tokens, identity.max_model_len)
        return -(-num_tokens // max(1, identity.block_size))


@dataclass(frozen=True, slots=True)
class Weights:
    """alpha: prefix the instance holds itself; gamma: how busy it is; chat: it served this chat's last turn."""

    alpha: float = 1.0
    gamma: float = 1.0
    chat: float = 0.2


@dataclass(frozen=True, slots=True)
class Scored:
    """Higher is better; scores compare within one plan only."""

    instance: Instance
    score: float


ScorePrefill = Callable[[Query, Instance, Mapping[str, int], Sequence[str], Weights], float]
ScoreDecode = Callable[[Query, Instance], float]
Pick = Callable[[Sequence[Scored], random.Random], list[Scored]]


@dataclass(frozen=True, slots=True)
class Policy:
    """How prefills and decodes are scored and in what order they are offered; pickers keep every candidate."""

    name: str
    score_prefill: ScorePrefill
    pick_prefill: Pick
    score_decode: ScoreDecode
    pick_decode: Pick


def prefix_and_load(
    query: Query,
    instance: Instance,
    matches: Mapping[str, int],
    affine: Sequence[str],
    weights: Weights,
) -> float:
    """alpha*matched/total + chat - gamma*used/slots (S107 without its remote and predicted terms)."""
    instance_id = instance.identity.instance_id
    total = len(query.block_hashes)
    matched = matches.get(instance_id, 0) / total if total else 0.0
    is_known_chat = instance_id in affine
    return weights.alpha * matched + weights.chat * is_known_chat - weights.gamma * _load(instance)


def fewest_used_prefill(
    query: Query,
    instance: Instance,
    matches: Mapping[str, int],
    affine: Sequence[str],
    weights: Weights,
) -> float:
    """Shortest queue: what most load balancers do."""
    return -float(instance.used_slots())


def constant_prefill(
    query: Query,
    instance: Instance,
    matches: Mapping[str, int],
    affine: Sequence[str],
    weights: Weights,
) -> float:
    return 0.0


def free_capacity(query: Query, instance: Instance) -> float:
    """Share of KV that stays free, times share of slots that are free; tiny but positive when there is none."""
    total = max(1, instance.identity.num_kv_blocks)
    free = max(0, instance.free_blocks() - query.num_blocks(instance)) / total
    return max(_EPSILON, min(1.0, free) * (1.0 - _load(instance)))


def fewest_used_decode(query: Query, instance: Instance) -> float:
    return -float(instance.used_slots())


def constant_decode(query: Query, instance: Instance) -> float:
    return 0.0


def best_first(scored: Sequence[Scored], rng: random.Random) -> list[Scored]:
    """By score; those within 10 % of the best in random order, so that several gateways do not herd."""
    ranked = sorted(scored, key=lambda s: -s.score)
    if not ranked:
        return ranked
    threshold = ranked[0].score - _TIE * abs(ranked[0].score) - _EPSILON
    num_tied = sum(1 for s in ranked if s.score >= threshold)
    tied = ranked[:num_tied]
    rng.shuffle(tied)
    return [*tied, *ranked[num_tied:]]


def weighted_random(scored: Sequence[Scored], rng: random.Random) -> list[Scored]:
    """A random order in which each place goes to one of the rest in proportion to its score (Efraimidis, Spirakis)."""
    keyed = [
        (math.log(1.0 - rng.random()) / max(_EPSILON, s.score), i) for i, s in enumerate(scored)
    ]
    return [scored[i] for _, i in sorted(keyed, reverse=True)]


@dataclass(slots=True)
class InTurn:
    """Each instance in its turn, whatever the scores."""

    _turns: dict[tuple[str, ...], int] = field(default_factory=dict)

    def __call__(self, scored: Sequence[Scored], rng: random.Random) -> list[Scored]:
        if not scored:
            return []
        key = tuple(s.instance.identity.instance_id for s in scored)
        if key not in self._turns and len(self._turns) >= 1024:
            self._turns.clear()
        turn = self._turns.get(key, 0)
        self._turns[key] = (turn + 1) % len(scored)
        return [*scored[turn:], *scored[:turn]]


def _load(instance: Instance) -> float:
    """Used slots over slots; above 1 when more was dispatched than there are."""
    return instance.used_slots() / max(1, instance.num_slots)


def default() -> Policy:
    return Policy("default", prefix_and_load, best_first, free_capacity, weighted_random)


def round_robin() -> Policy:
    return Policy("round_robin", constant_prefill, InTurn(), constant_decode, InTurn())


def least_connections() -> Policy:
    return Policy(
        "least_connections", fewest_used_prefill, best_first, fewest_used_decode, best_first
    )


POLICIES: Final[dict[str, Callable[[], Policy]]] = {
    "default": default,
    "round_robin": round_robin,
    "least_connections": least_connections,
}
