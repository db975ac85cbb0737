"""Where a request may go, best first: filter, score, pick (S89, S94, S107, S108).

A plan names prefills and decodes of one cell (group and model fingerprint), since only those can hand KV to each other, or
fusion instances, which need no decode. The ranking is advice: whether an instance takes the request is its own decision.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pdmesh.core.chat_affinity import ChatAffinity
from pdmesh.core.fleet import Fleet, Instance, Role
from pdmesh.core.placement_policies import POLICIES, Policy, Query, Scored, Weights

DEFAULT_MODEL = "default"  # names whatever model the scenario serves
DEFAULT_SCENARIO = "default"
MODEL_NOT_FOUND = "MODEL_NOT_FOUND"
NO_INSTANCE = "NO_INSTANCE"
PROMPT_TOO_LONG = "PROMPT_TOO_LONG"


@dataclass(frozen=True, slots=True)
class Candidate:
    instance_id: str
    incarnation: int
    num_matched_tokens: int
    score: float


@dataclass(frozen=True, slots=True)
class Plan:
    """Ranked candidates of one group. `decodes` is empty if the prefills are fusion instances."""

    group_id: str
    prefills: tuple[Candidate, ...]
    decodes: tuple[Candidate, ...]


@dataclass(frozen=True, slots=True)
class NoPlan:
    """There is nothing to rank."""

    reason: str
    message: str


@dataclass(slots=True)
class _Cell:
    prefills: list[Instance] = field(default_factory=list)
    decodes: list[Instance] = field(default_factory=list)


@dataclass(slots=True)
class Placement:
    """Ranks with one named policy, and remembers what it sent where until loads tell."""

    fleet: Fleet
    rng: random.Random
    policy: Policy = field(default_factory=POLICIES["default"])
    weights: Weights = field(default_factory=Weights)
    max_candidates: int = 8
    chats: ChatAffinity = field(default_factory=ChatAffinity)

    def plan(self, query: Query, matches: Mapping[str, int], now: float) -> Plan | NoPlan:
        """`matches`: contiguous blocks that each instance holds of the prompt."""
        self.fleet.settle(now)
        cells = self._cells(query)
        if isinstance(cells, NoPlan):
            return cells
        affine = self.chats.get(query.chat_id, now)
        scored = self._score_prefills(query, cells, matches, affine)
        ranked = self.policy.pick_prefill(scored, self.rng)
        cell = cells[_key(ranked[0].instance)]
        own = {id(instance) for instance in cell.prefills}
        prefills = [s for s in ranked if id(s.instance) in own][: self.max_candidates]
        decodes = self._rank_decodes(query, cell.decodes, affine)[: self.max_candidates]
        self._dispatched(query, prefills[0].instance, decodes[0].instance if decodes else None, now)
        return Plan(
            prefills[0].instance.identity.group_id,
            tuple(_candidate(s, matches) for s in prefills),
            tuple(_candidate(s, matches) for s in decodes),
        )

    def _cells(self, query: Query) -> dict[tuple[str, str, bool], _Cell] | NoPlan:
        """Every set of instances that together can serve the query, by what they have in common."""
        serving = [i for i in self.fleet.instances.values() if _serves(i, query)]
        if not serving:
            return NoPlan(MODEL_NOT_FOUND, f"no instance serves {query.model or DEFAULT_MODEL}")
        fitting = [i for i in serving if _could_hold(i, query)]
        if not fitting:
            return NoPlan(PROMPT_TOO_LONG, "prompt and output do not fit any instance")
        cells: dict[tuple[str, str, bool], _Cell] = {}
        for instance in fitting:
            if not instance.is_usable or instance.identity.instance_id in query.excluded:
                continue
            cell = cells.setdefault(_key(instance), _Cell())
            is_decode = instance.identity.role is Role.DECODE
            (cell.decodes if is_decode else cell.prefills).append(instance)
        whole = {key: c for key, c in cells.items() if c.prefills and (c.decodes or key[2])}
        if not whole:
            return NoPlan(NO_INSTANCE, "no healthy prefill with a decode in its group")
        return whole

    def _score_prefills(
        self,
        query: Query,
        cells: Mapping[tuple[str, str, bool], _Cell],
        matches: Mapping[str, int],
        affine: Sequence[str],
    ) -> list[Scored]:
        instances = [instance for cell in cells.values() for instance in cell.prefills]
        return [
            Scored(i, self.policy.score_prefill(query, i, matches, affine, self.weights))
            for i in sorted(instances, key=_id)
        ]

    def _rank_decodes(
        self, query: Query, decodes: Iterable[Instance], affine: Sequence[str]
    ) -> list[Scored]:
        """Those with room now, else all of them: one may have room by the time it is asked."""
        ordered = sorted(decodes, key=_id)
        with_room = [d for d in ordered if d.free_blocks() >= query.num_blocks(d)]
        scored = [Scored(d, self.policy.score_decode(query, d)) for d in with_room or ordered]
        ranked = self.policy.pick_decode(scored, self.rng)
        return sorted(ranked, key=lambda s: not (with_room and _is_affine(s.instance, affine)))

    def _dispatched(
        self, query: Query, prefill: Instance, decode: Instance | None, now: float
    ) -> None:
        prefill.dispatch(0 if decode else query.num_blocks(prefill), now)
        ids = [prefill.identity.instance_id]
        if decode is not None:
            decode.dispatch(query.num_blocks(decode), now)
            ids.append(decode.identity.instance_id)
        self.chats.put(query.chat_id, tuple(ids), now)


def _serves(instance: Instance, query: Query) -> bool:
    identity = instance.identity
    if identity.role is Role.NONE or identity.scenario != (query.scenario or DEFAULT_SCENARIO):
        return False
    return query.model in ("", DEFAULT_MODEL) or identity.model == query.model


def _could_hold(instance: Instance, query: Query) -> bool:
    """An empty instance could; prefill holds the prompt alone, which the model's length bounds."""
    identity = instance.identity
    if identity.max_model_len and query.num_prompt_tokens >= identity.max_model_len:
        return False
    if identity.role is Role.PREFILL or not identity.num_kv_blocks:
        return True
    return identity.num_kv_blocks >= query.num_blocks(instance)


def _key(instance: Instance) -> tuple[str, str, bool]:
    return (*instance.identity.cell, instance.identity.role is Role.FUSION)


def _id(instance: Instance) -> str:
    return instance.identity.instance_id


def _is_affine(instance: Instance, affine: Sequence[str]) -> bool:
    has_slot = instance.used_slots() < instance.num_slots
    return has_slot and instance.identity.instance_id in affine


def _candidate(scored: Scored, matches: Mapping[str, int]) -> Candidate:
    identity = scored.instance.identity
    num_matched = matches.get(identity.instance_id, 0) * identity.block_size
    return Candidate(identity.instance_id, identity.incarnation, num_matched, scored.score)
