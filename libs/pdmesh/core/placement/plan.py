"""Ranks the instances that may serve a request (S89, S94, S107, S108).

A plan names candidates for one request, best first. The instances of a group serve one scenario, a
kind of requests. All candidates belong to one cell, which is a set of prefills and decodes that can
hand KV to each other. These have the same group, revision and KV region, and the same fingerprint,
which names all properties that must agree for the exchange of KV. Fusion instances, which need no
decode, have cells without decodes. Cells in the region of the request's gateway are preferred. If
every cell has lost all its prefills or all its decodes, or has no pair that can exchange KV well,
one instance does both phases (colocated).

A plan is only advice, because each instance decides itself whether it accepts the request.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Final

from pdmesh.core.kv.prefix.prefix_index import NO_PEERS, PeerRuns
from pdmesh.core.kv.transfer.source_exclusions import Fit, KvExchange
from pdmesh.core.model import Role
from pdmesh.core.placement.baselines import POLICIES
from pdmesh.core.placement.chat_affinity import Turn
from pdmesh.core.placement.fleet import Fleet
from pdmesh.core.placement.instance import Booking, Instance
from pdmesh.core.placement.policies import (
    Known,
    Policy,
    Query,
    Scored,
    Weights,
)
from pdmesh.core.placement.request_region import nearest
from pdmesh.core.placement.shortlist import Shortlist, TypicalWork, shortlist

DEFAULT_MODEL = "default"  # any model that the scenario serves
DEFAULT_SCENARIO = "default"
MODEL_NOT_FOUND = "MODEL_NOT_FOUND"
SCENARIO_NOT_FOUND = "SCENARIO_NOT_FOUND"
NO_INSTANCE = "NO_INSTANCE"
PROMPT_TOO_LONG = "PROMPT_TOO_LONG"


@dataclass(frozen=True, slots=True)
class RankedInstance:
    instance_id: str
    incarnation: int
    num_matched_tokens: int
    score: float
    is_local: bool = False  # it does both phases


@dataclass(frozen=True, slots=True)
class Plan:
    """Ranked candidates of one group. `decodes` is empty if the prefills do both phases."""

    group_id: str
    prefills: tuple[RankedInstance, ...]
    decodes: tuple[RankedInstance, ...]
    prompt_compute_s: float = 0.0  # predicted for an empty cache, or 0 if unknown
    first_token_s: float = 0.0  # predicted time from now to token 1 of the best prefill


@dataclass(frozen=True, slots=True)
class NoPlan:
    """No instance can serve the request, for this reason."""

    reason: str
    message: str


# The group id, then fingerprint, revision and KV region as one text, then whether the cell's
# instances are fusion instances.
CellKey = tuple[str, str, bool]
_MAX_CELL_SETS: Final = 256
_ALL: Final = 1 << 60
_ADAPTER_PART: Final = 4  # 1/4 of the shortlist is for prefills that have loaded the adapter
_OTHERS: Final = 4  # prefills drawn per candidate of a plan, if a cell has too few on the shortlist
_BY_ID: Final = attrgetter("id")


@dataclass(slots=True)
class _Cell:
    """Instances that can serve a query together.

    Every instance of the cell can hold a query of at most `safe_tokens` prompt tokens and
    `safe_blocks` KV blocks.
    """

    key: CellKey
    prefills: list[Instance] = field(default_factory=list)
    decodes: list[Instance] = field(default_factory=list)
    safe_tokens: float = math.inf
    safe_blocks: float = math.inf
    _by_id: dict[str, Instance] = field(default_factory=dict)

    def member(self, instance_id: str) -> Instance | None:
        if len(self._by_id) != len(self.prefills) + len(self.decodes):
            self._by_id = {i.id: i for i in (*self.prefills, *self.decodes)}
        return self._by_id.get(instance_id)

    def add(self, instance: Instance) -> None:
        (self.decodes if instance.is_decode else self.prefills).append(instance)
        identity = instance.identity
        if identity.max_model_len:
            self.safe_tokens = min(self.safe_tokens, identity.max_model_len - 1)
        if identity.role is not Role.PREFILL and identity.num_kv_blocks:
            self.safe_blocks = min(self.safe_blocks, identity.num_kv_blocks)

    @property
    def region(self) -> str:
        """The region that its KV stays in, or empty if there is no such region."""
        return (self.prefills or self.decodes)[0].identity.kv_region

    @property
    def has_room(self) -> bool:
        """Whether an instance of each role of the cell has a free slot."""
        has_prefill = any(i.used_slots() < i.num_slots for i in self.prefills)
        return has_prefill and (
            not self.decodes or any(i.used_slots() < i.num_slots for i in self.decodes)
        )

    @property
    def is_whole(self) -> bool:
        return bool(self.prefills and (self.decodes or self.key[2]))

    def colocated(self, query: Query, exchange: KvExchange) -> _Cell:
        """This cell's instances of both roles, as instances that each do both phases.

        The result serves requests without moving KV. Use it if the cell has lost a role, or if no
        pair in it may exchange KV for now. A prefill is left out if every decode ejects it, because
        its KV was corrupt.
        """
        cell = _Cell(self.key)
        sound = [
            prefill
            for prefill in self.prefills
            if not self.decodes
            or any(exchange.fit(d.id, prefill.id) is not Fit.EJECTED for d in self.decodes)
        ]
        cell.prefills = [i for i in (*sound, *self.decodes) if _could_hold(i, query, is_local=True)]
        return cell

    def has_good_pair(self, exchange: KvExchange) -> bool:
        """Whether any decode of the cell has a prefill that it neither ejects nor avoids.

        Decodes eject prefills whose KV was corrupt, and avoid prefills whose KV came late.
        """
        if self.key[2] or not exchange:
            return True
        return any(
            exchange.fit(decode.id, prefill.id) is Fit.GOOD
            for decode in self.decodes
            for prefill in self.prefills
        )

    def narrowed(self, query: Query) -> _Cell:
        """The cell without the instances that are excluded or cannot hold the query.

        If all instances remain, the result may be this cell itself.
        """
        is_plain = not (query.excluded or query.adapter or query.has_images)
        if is_plain and query.num_prompt_tokens <= self.safe_tokens:
            any_member = (self.prefills or self.decodes)[0]
            if query.num_blocks(any_member) <= self.safe_blocks:
                return self
        cell = _Cell(self.key)
        for instance in (*self.prefills, *self.decodes):
            if _could_hold(instance, query) and instance.id not in query.excluded:
                cell.add(instance)
        return cell

    def reconciled(self, exchange: KvExchange) -> _Cell:
        """The cell without prefills that every decode ejects and decodes that eject every prefill.

        Returns the cell itself if no decode excludes a prefill.
        """
        if not exchange or self.key[2]:
            return self
        silent = exchange.of_silent(len(self.decodes))
        if silent is not None and not silent:
            return self._without_lonely_decodes(exchange)
        cell = _Cell(self.key)

        def may(decode: Instance, prefill: Instance) -> bool:
            return exchange.fit(decode.id, prefill.id) is not Fit.EJECTED

        for prefill in self.prefills:
            if any(may(decode, prefill) for decode in self.decodes):
                cell.add(prefill)
        for decode in self.decodes:
            if any(may(decode, prefill) for prefill in self.prefills):
                cell.add(decode)
        return cell

    def _without_lonely_decodes(self, exchange: KvExchange) -> _Cell:
        """The cell without decodes that eject every prefill.

        Only decodes that report exclusions are checked. Every prefill stays, because some decodes
        report none.
        """
        lonely = [
            decode_id
            for decode_id in exchange.reporters()
            if len(exchange.exclusions(decode_id).ejected) >= len(self.prefills)
            and all(exchange.fit(decode_id, p.id) is Fit.EJECTED for p in self.prefills)
        ]
        if not lonely:
            return self
        cell = _Cell(self.key)
        for instance in (*self.prefills, *self.decodes):
            if not (instance.is_decode and instance.id in lonely):
                cell.add(instance)
        return cell


@dataclass(slots=True)
class Placement:
    """Plans requests with one policy.

    Each plan is booked: the request counts as load of the plan's best prefill and best decode until
    load reports include it.
    """

    fleet: Fleet
    rng: random.Random
    policy: Policy = field(default_factory=POLICIES["default"])
    weights: Weights = field(default_factory=Weights)
    max_candidates: int = 8
    # The share of its scenario's requests that each canary group gets.
    shares: Mapping[str, float] = field(default_factory=dict)
    _cells: dict[tuple[str, str], list[_Cell]] = field(default_factory=dict)
    _cells_version: int = -1
    _exchange: KvExchange = field(default_factory=KvExchange)
    _num_plans: int = 0
    _works: dict[tuple[str, str, str], TypicalWork] = field(default_factory=dict)

    def plan(
        self,
        query: Query,
        matches: Mapping[str, int],
        now: float,
        peers: PeerRuns = NO_PEERS,
        num_cached: Callable[[str], int] = lambda instance_id: 0,
    ) -> Plan | NoPlan:
        """The candidates of one request, or the reason why there are none. Books the plan.

        `matches` has, by instance, the number of blocks from the prompt's beginning whose KV it
        holds. `peers` has the blocks of the prompt that instances can fetch from the host memory of
        others. `num_cached` returns the number of all blocks that an instance holds.
        """
        self.fleet.settle(now)
        cells = self._cells_for(query)
        if isinstance(cells, NoPlan):
            return cells
        affine = self.fleet.chats.get(query.chat_id, now)
        predictor = self.fleet.predictor
        known = Known(matches, predictor, self.weights, now, affine, peers, num_cached)
        prefills, cell = self._rank_prefills(query, cells, known)
        decodes = self._rank_decodes(query, cell, prefills[0].instance, affine)
        self._book(query, prefills[0].instance, decodes[0].instance if decodes else None, known)
        return Plan(
            cell.key[0],
            tuple(_candidate(s, matches, is_local=not decodes) for s in prefills),
            tuple(_candidate(s, matches) for s in decodes),
            predictor.whole_s(prefills[0].instance.kind, query.num_prompt_tokens),
            prefills[0].instance.available_at - now,
        )

    def share_requests(self, shares: Mapping[str, float]) -> None:
        """Set the share of its scenario's requests that each canary group gets.

        A canary is a group that tries out a new revision.
        """
        self.shares = shares

    def _cells_for(self, query: Query) -> list[_Cell] | NoPlan:
        """The cells that can serve the query, restricted by region and by the canary's share."""
        if self._cells_version != self.fleet.version or len(self._cells) > _MAX_CELL_SETS:
            self._cells.clear()
            self._cells_version = self.fleet.version
            self._exchange = _exchange_among(self.fleet)
        key = (query.scenario, query.model)
        known = self._cells.get(key)
        if known is None:
            known = self._cells[key] = self._usable_cells(query)
        narrowed = [cell.narrowed(query) for cell in known]
        exchange = self._exchange
        whole = [c for cell in narrowed if (c := cell.reconciled(exchange)).is_whole]
        if any(cell.has_good_pair(exchange) for cell in whole):
            return nearest(self._by_share(whole), query.region)
        alone = [cell for n in narrowed if (cell := n.colocated(query, exchange)).prefills]
        return nearest(alone, query.region) or self._why_none(query)

    def _by_share(self, cells: list[_Cell]) -> list[_Cell]:
        """Choose at random, by the canary's share, between the canary and the other cells (S24)."""
        shared = [cell for cell in cells if cell.key[0] in self.shares]
        if not shared:
            return cells
        if self.rng.random() < self.shares[shared[0].key[0]]:
            return shared
        return [cell for cell in cells if cell.key[0] not in self.shares] or shared

    def _usable_cells(self, query: Query) -> list[_Cell]:
        cells: dict[CellKey, _Cell] = {}
        for instance in sorted(self.fleet.instances.values(), key=_BY_ID):
            if instance.is_usable and _serves(instance, query):
                key = _key(instance)
                cells.setdefault(key, _Cell(key)).add(instance)
        return list(cells.values())

    def _why_none(self, query: Query) -> NoPlan:
        instances = self.fleet.instances.values()
        serving = [i for i in instances if _serves(i, query)]
        if not serving:
            model = query.model or DEFAULT_MODEL
            if any(_has_model(i, query.model) for i in instances):
                scenario = query.scenario or DEFAULT_SCENARIO
                message = f"no instance serves {model} for the scenario {scenario}"
                return NoPlan(SCENARIO_NOT_FOUND, message)
            return NoPlan(MODEL_NOT_FOUND, f"no instance serves {model}")
        if query.adapter and not any(i.identity.takes_adapters for i in serving):
            return NoPlan(NO_INSTANCE, "no instance of this model takes adapters: ENABLE_LORA")
        if query.has_images and not any(i.identity.takes_images for i in serving):
            return NoPlan(NO_INSTANCE, "no instance of this model takes images")
        if not any(_could_hold(i, query) for i in serving):
            return NoPlan(PROMPT_TOO_LONG, "prompt and output do not fit any instance")
        return NoPlan(NO_INSTANCE, "no healthy prefill with a decode in its group")

    def _rank_prefills(
        self, query: Query, cells: Sequence[_Cell], known: Known
    ) -> tuple[list[Scored], _Cell]:
        """Rank the prefills of all cells, and return the ones in the cell of the best prefill.

        Prefills that all decodes of their cell avoid come last.
        """
        listed = self._shortlisted(query, cells, known)
        instances = listed.instances
        if listed.drawn:
            known = replace(known, typical=self._typical(query, listed.drawn, known.now))
        scored = self._score(query, instances, known)
        if len(cells) == 1 and not self._exchange:
            return self.policy.pick_prefill(scored, self.rng, self.max_candidates), cells[0]
        ranked = self.policy.pick_prefill(scored, self.rng, len(scored))
        if self._exchange:
            by_key = {cell.key: cell for cell in cells}
            ranked.sort(key=lambda s: self._best_fit(by_key[_key(s.instance)], s.instance))
        key = _key(ranked[0].instance)
        own = [s for s in ranked if _key(s.instance) == key]
        cell = next(c for c in cells if c.key == key)
        if len(own) < min(self.max_candidates, len(cell.prefills)):
            own = self._with_others(query, own, cell, known)
        return own[: self.max_candidates], cell

    def _score(self, query: Query, instances: Sequence[Instance], known: Known) -> list[Scored]:
        scores = self.policy.score_prefills(query, instances, known)
        return [Scored(i, s) for i, s in zip(instances, scores, strict=True)]

    def _typical(self, query: Query, drawn: Sequence[Instance], now: float) -> TypicalWork:
        """The mean work of instances for this scenario, model and region, updated by `drawn`."""
        key = (query.scenario, query.model, query.region)
        if key not in self._works and len(self._works) >= _MAX_CELL_SETS:
            self._works.clear()
        work = self._works.setdefault(key, TypicalWork())
        work.hear(drawn, now)
        return work

    def _shortlisted(self, query: Query, cells: Sequence[_Cell], known: Known) -> Shortlist:
        """The prefills to score, which are all prefills unless there are too many."""
        most = self.policy.most_scored or _ALL
        by_key = {cell.key: cell for cell in cells}

        def find(instance_id: str) -> Instance | None:
            instance = self.fleet.instances.get(instance_id)
            cell = by_key.get(_key(instance)) if instance is not None else None
            found = cell.member(instance_id) if cell is not None else None
            is_prefill = found is not None and not (found.is_decode and cell and cell.decodes)
            return found if is_prefill else None

        parts = [cell.prefills for cell in cells]
        kept = [*known.affine, *self._with_adapter(query, parts, most // _ADAPTER_PART)]
        return shortlist(parts, most, self.rng, known.matches, find, kept)

    def _with_adapter(
        self, query: Query, parts: Sequence[Sequence[Instance]], count: int
    ) -> list[str]:
        """The ids of up to `count` random prefills that have loaded the query's adapter."""
        if not query.adapter:
            return []
        loaded = [i.id for part in parts for i in part if query.adapter in i.identity.adapters]
        return self.rng.sample(loaded, min(count, len(loaded)))

    def _with_others(
        self, query: Query, own: list[Scored], cell: _Cell, known: Known
    ) -> list[Scored]:
        """Rank other prefills of the cell behind `own`, because too few were on the shortlist."""
        seen = {s.instance.id for s in own}
        most = _OTHERS * self.max_candidates
        drawn = shortlist([cell.prefills], most, self.rng, known.matches, cell.member).instances
        others = [i for i in drawn if i.id not in seen and not (i.is_decode and cell.decodes)]
        if not others:
            return own
        scored = self._score(query, others, known)
        ranked = own + self.policy.pick_prefill(scored, self.rng, len(scored))
        if self._exchange:
            ranked.sort(key=lambda s: self._best_fit(cell, s.instance))
        return ranked

    def _best_fit(self, cell: _Cell, prefill: Instance) -> Fit:
        """The best fit between the prefill and any decode of its cell."""
        if cell.key[2] or not cell.decodes:
            return Fit.GOOD
        if (silent := self._exchange.of_silent(len(cell.decodes))) is not None:
            return silent.fit(prefill.id)
        return min(self._exchange.fit(decode.id, prefill.id) for decode in cell.decodes)

    def _rank_decodes(
        self, query: Query, cell: _Cell, prefill: Instance, affine: Sequence[str]
    ) -> list[Scored]:
        """Rank the decodes of the cell for `prefill`, the best prefill.

        Decodes that avoid or eject this prefill come last. Other prefills of the plan may use them.
        """
        if not self._exchange.excludes(prefill.id):
            return self._rank_alike(query, cell.decodes, affine, cell.member)
        ranked: list[Scored] = []
        for fit in Fit:
            alike = [d for d in cell.decodes if self._exchange.fit(d.id, prefill.id) is fit]
            ranked += self._rank_alike(query, alike, affine, {d.id: d for d in alike}.get)
        return ranked[: self.max_candidates]

    def _rank_alike(
        self,
        query: Query,
        decodes: Sequence[Instance],
        affine: Sequence[str],
        find: Callable[[str], Instance | None],
    ) -> list[Scored]:
        """Rank the decodes that have room now.

        If no decode has room, all are ranked, because one may have room when the request arrives.
        """
        if not decodes:
            return []
        num_blocks = query.num_blocks(decodes[0])

        def has_room(decode: Instance) -> bool:
            return decode.num_kv_blocks_free - decode.num_booked_blocks >= num_blocks

        def can_serve(decode: Instance) -> bool:
            return has_room(decode) and decode.used_slots() < decode.num_slots

        most = self.policy.most_scored
        if most and len(decodes) > most:
            own = [name for name in affine if (i := find(name)) is not None and i.is_decode]
            listed = shortlist([decodes], most, self.rng, {}, find, own, can_serve)
            decodes = listed.instances
        with_room = [d for d in decodes if has_room(d)]
        asked = with_room or decodes
        scores = self.policy.score_decodes(query, asked)
        scored = [Scored(d, s) for d, s in zip(asked, scores, strict=True)]
        ranked = self.policy.pick_decode(scored, self.rng, self.max_candidates)
        if with_room and affine:
            home = [s for s in scored if _is_affine(s.instance, affine)]
            ranked = [*home, *(s for s in ranked if s not in home)][: self.max_candidates]
        return ranked

    def _book(self, query: Query, prefill: Instance, decode: Instance | None, known: Known) -> None:
        block_size = max(1, prefill.identity.block_size)
        num_held = min(known.matches.get(prefill.id, 0), len(query.block_hashes))
        num_fetched = 0
        if known.peers.runs and prefill.identity.fetches_from_peers:
            num_fetched = max(0, known.peers.reach(num_held) - num_held) * block_size
        seconds = prefill.slowness * known.predictor.fit(prefill.kind).predict_s(
            query.num_prompt_tokens,
            min(num_held * block_size + num_fetched, query.num_prompt_tokens),
            num_fetched=num_fetched,
            num_beside=prefill.num_beside,
            is_queued=prefill.available_at > known.now,
        )
        num_prompt_blocks = -(-query.num_prompt_tokens // block_size)
        num_blocks = query.num_blocks(prefill)
        self._num_plans += 1
        request_id = query.request_id or f"#{self._num_plans}"
        now = known.now
        self.fleet.reservations.book(
            request_id,
            Booking(
                prefill,
                0 if decode else num_blocks,
                seconds,
                num_prompt_blocks - num_held,
                now,
                num_fetched,
            ),
            Booking(decode, query.num_blocks(decode), 0.0, 0, now) if decode else None,
            now,
        )
        if query.chat_id:
            turn = Turn(request_id, prefill.id, decode.id if decode else "", query.excluded)
            self.fleet.chats.put(query.chat_id, turn, now)


def _exchange_among(fleet: Fleet) -> KvExchange:
    members = fleet.instances.values()
    return KvExchange.of(
        {m.id: m.identity.excluded_sources for m in members if m.identity.excluded_sources},
        {m.id: m.identity.incarnation for m in members},
    )


def _serves(instance: Instance, query: Query) -> bool:
    if instance.identity.scenario != (query.scenario or DEFAULT_SCENARIO):
        return False
    return _has_model(instance, query.model)


def _has_model(instance: Instance, model: str) -> bool:
    identity = instance.identity
    is_of_phase = identity.role not in (Role.NONE, Role.POOLING, Role.ENCODER)
    return is_of_phase and model in ("", DEFAULT_MODEL, identity.model)


def _could_hold(instance: Instance, query: Query, *, is_local: bool = False) -> bool:
    """Whether the instance could hold the query if it had no other requests.

    With `is_local`, a prefill must hold the prompt and the answer. Otherwise it holds only the
    prompt, and only the model limits the prompt's length.
    """
    identity = instance.identity
    if query.adapter and not identity.takes_adapters:
        return False
    if query.has_images and not identity.takes_images:
        return False
    if identity.max_model_len and query.num_prompt_tokens >= identity.max_model_len:
        return False
    is_prompt_alone = identity.role is Role.PREFILL and not is_local
    if is_prompt_alone or not identity.num_kv_blocks:
        return True
    return identity.num_kv_blocks >= query.num_blocks(instance)


def _key(instance: Instance) -> tuple[str, str, bool]:
    return (*instance.identity.cell, instance.identity.role is Role.FUSION)


def _is_affine(instance: Instance, affine: Sequence[str]) -> bool:
    has_slot = instance.used_slots() < instance.num_slots
    return has_slot and instance.id in affine


def _candidate(
    scored: Scored, matches: Mapping[str, int], *, is_local: bool = False
) -> RankedInstance:
    identity = scored.instance.identity
    num_matched = matches.get(identity.instance_id, 0) * identity.block_size
    return RankedInstance(
        identity.instance_id, identity.incarnation, num_matched, scored.score, is_local
    )
