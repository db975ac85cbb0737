"""Ranks instances for a request in a gateway, while no master answers (S42).

Normally the master plans which instances serve a request. A gateway knows only the registry and its
own open legs, which are its requests' stays on instances. It ranks the instances of its region,
that is, those near it, first (S58). Among these, the instances with the fewest open legs come
first. Instances that are about to leave or may be faulty are used only if the others cannot serve.
A canary, which tries a new revision, gets its share of the requests (S24). Fusion instances do both
phases. If there are none, and no prefill and decode can exchange KV, instances of one role do both
phases.

The cost of a ranking must not grow with the mesh. If a role has more than `MOST_RANKED` instances,
a random sample of them is ranked. The least used instance of the sample is used hardly more than
the least used of all. All instances are ranked only if too few in the sample can serve.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from pdmesh.core.model import Role
from pdmesh.core.placement.plan import DEFAULT_SCENARIO
from pdmesh.core.placement.shortlist import sampled

MOST_RANKED: Final = 64  # of a role; if there are more, a sample of this size is ranked
_LEAST_ABLE: Final = 8  # usable instances of a role that a sample must have; a request tries 8
_LOADED: Final = MOST_RANKED // 4  # the most instances with the query's adapter added to a sample
_PREFILL_ROLES: Final = (Role.PREFILL, Role.FUSION)


@dataclass(frozen=True, slots=True)
class LocalInstance:
    """An instance that takes requests, as its record shows it.

    If `scenario` is empty, the instance serves every scenario.
    """

    id: str
    incarnation: int
    role: Role
    model: str
    scenario: str
    group_id: str
    pair: str  # equal for instances that may exchange KV
    region: str
    takes_adapters: bool = False
    adapters: frozenset[str] = frozenset()  # digests of the LoRA adapters that it has loaded
    takes_images: bool = False


@dataclass(frozen=True, slots=True)
class LocalQuery:
    """A request to rank instances for.

    `excluded` instances have failed for this request. `avoided` instances are ranked only if the
    others cannot serve it. `canary` has the id of the scenario's canary group, and whether the
    canary gets this request. `adapter` is the LoRA adapter that the request needs. Only instances
    that take adapters can serve it, and instances that have loaded this adapter come first.
    """

    model: str
    scenario: str = ""
    excluded: Container[str] = ()
    avoided: Container[str] = ()
    canary: tuple[str, bool] | None = None
    adapter: str = ""  # digest
    has_images: bool = False  # only instances that take images can serve it


@dataclass(frozen=True, slots=True)
class LocalPlan:
    """The ranked instances, best first.

    If `is_colocated`, `prefills` has prefills only or decodes only, and one of them does both
    phases.
    """

    prefills: Sequence[LocalInstance] = ()
    decodes: Sequence[LocalInstance] = ()
    is_colocated: bool = False


_Order = Callable[[LocalInstance], tuple[bool, bool, int, bytes]]
_Kind = list[LocalInstance]  # instances that differ only in their ids and loaded adapters


@dataclass(slots=True)
class LocalRanking:
    """Ranks the instances for one gateway, whose region is `region`.

    `gateway_id` decides the order of instances that the gateway has used equally. So gateways
    without a master do not all begin with the same instance. `gateway_id` also seeds the random
    samples.
    """

    region: str = ""
    gateway_id: str = ""
    _instances: list[LocalInstance] = field(default_factory=list)
    _kinds: list[_Kind] = field(default_factory=list)
    _loaded: dict[str, list[LocalInstance]] = field(default_factory=dict)  # by adapter
    _ties: dict[str, bytes] = field(default_factory=dict)
    _rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._rng = random.Random(self.gateway_id)

    def see(self, instances: Iterable[LocalInstance]) -> None:
        """Replace the known instances by `instances`."""
        self._instances = list(instances)
        self._ties = {i.id: self._ties.get(i.id) or self._tie(i.id) for i in self._instances}
        kinds: dict[object, _Kind] = {}
        self._loaded = {}
        for instance in self._instances:
            kinds.setdefault(_kind(instance), []).append(instance)
            for adapter in instance.adapters:
                self._loaded.setdefault(adapter, []).append(instance)
        self._kinds = list(kinds.values())

    def rank(self, query: LocalQuery, num_open: Callable[[str, int], int]) -> LocalPlan:
        """The instances that can serve the query. The plan is empty if there are none.

        `num_open` returns the gateway's number of open legs for an instance id and incarnation.
        """

        def order(instance: LocalInstance) -> tuple[bool, bool, int, bytes]:
            is_new = bool(query.adapter) and query.adapter not in instance.adapters
            num = num_open(instance.id, instance.incarnation)
            return self._is_far(instance), is_new, num, self._ties[instance.id]

        if len(self._instances) > MOST_RANKED and (plan := self._rank_drawn(query, order)):
            return plan
        return self._rank_all(query, order)

    def _rank_drawn(self, query: LocalQuery, order: _Order) -> LocalPlan | None:
        """Rank a sample, or return None if too few instances in it can serve."""
        able = [k for k in self._kinds if _can_serve(k[0], query) and _has_its_turn(k[0], query)]
        pairs = {kind[0].pair for kind in able if kind[0].role is Role.PREFILL}
        given = [k for k in able if k[0].role is Role.DECODE and k[0].pair in pairs]
        decodes = self._drawn(query, given, order)
        best = {d.pair for d in decodes[:_LEAST_ABLE]}
        taking = [k for k in able if _computes_for(k[0], best)]
        prefills = self._drawn(query, taking, order)
        for kinds, drawn in ((given, decodes), (taking, prefills)):
            if len(drawn) < _LEAST_ABLE and sum(map(len, kinds)) > MOST_RANKED:
                return None
        return _paired([*prefills, *decodes])

    def _drawn(
        self, query: LocalQuery, kinds: Sequence[_Kind], order: _Order
    ) -> list[LocalInstance]:
        """A sample of the usable instances of these kinds, best first.

        At most MOST_RANKED are drawn, from the gateway's region if it has enough. Some instances
        that have loaded the query's adapter are added.
        """
        near = [kind for kind in kinds if not self._is_far(kind[0])]
        drawn = list(sampled(near, MOST_RANKED, self._rng))
        if len(drawn) < MOST_RANKED and len(near) < len(kinds):
            far = [kind for kind in kinds if self._is_far(kind[0])]
            drawn += sampled(far, MOST_RANKED - len(drawn), self._rng)
        if query.adapter and (loaded := self._loaded.get(query.adapter)):
            names, known = {_kind(kind[0]) for kind in kinds}, {i.id for i in drawn}
            more = sampled([loaded], _LOADED, self._rng)
            drawn += [i for i in more if i.id not in known and _kind(i) in names]
        able = [i for i in drawn if i.id not in query.excluded and i.id not in query.avoided]
        return sorted(able, key=order)

    def _rank_all(self, query: LocalQuery, order: _Order) -> LocalPlan:
        able = [i for i in self._instances if _can_serve(i, query) and i.id not in query.excluded]
        able.sort(key=order)
        for some in ([i for i in able if i.id not in query.avoided], able):
            if query.canary is not None:
                one_side = [i for i in some if _has_its_turn(i, query)]
                if (plan := _paired(one_side)) is not None:
                    return plan
            if (plan := _paired(some) or _colocated(some)) is not None:
                return plan
        return LocalPlan()

    def _is_far(self, instance: LocalInstance) -> bool:
        return bool(self.region) and instance.region not in (self.region, "")

    def _tie(self, instance_id: str) -> bytes:
        name = instance_id.encode()
        if not self.gateway_id:
            return name
        return hashlib.blake2b(name, key=self.gateway_id.encode()[:64], digest_size=8).digest()


def _kind(i: LocalInstance) -> tuple[object, ...]:
    takes = (i.takes_adapters, i.takes_images)
    return (i.role, i.model, i.scenario, i.group_id, i.pair, i.region, takes)


def _can_serve(instance: LocalInstance, query: LocalQuery) -> bool:
    scenario = query.scenario or DEFAULT_SCENARIO  # scenarios share no instances (S4)
    return (
        instance.model == query.model
        and (instance.scenario or scenario) == scenario
        and (not query.adapter or instance.takes_adapters)
        and (not query.has_images or instance.takes_images)
    )


def _has_its_turn(instance: LocalInstance, query: LocalQuery) -> bool:
    if query.canary is None:
        return True
    group_id, is_its_turn = query.canary
    return (instance.group_id == group_id) is is_its_turn


def _computes_for(instance: LocalInstance, pairs: Container[str]) -> bool:
    """Whether it is a fusion instance, or a prefill that may hand KV to decodes of these pairs."""
    is_pair = instance.role is Role.PREFILL and instance.pair in pairs
    return is_pair or instance.role is Role.FUSION


def _paired(ranked: Sequence[LocalInstance]) -> LocalPlan | None:
    prefills = [i for i in ranked if i.role in _PREFILL_ROLES]
    decodes = [i for i in ranked if i.role is Role.DECODE]
    pairs = {i.pair for i in decodes}
    can_serve = any(i.role is Role.FUSION or i.pair in pairs for i in prefills)
    return LocalPlan(prefills, decodes) if can_serve else None


def _colocated(ranked: Sequence[LocalInstance]) -> LocalPlan | None:
    for role in (Role.PREFILL, Role.DECODE):
        if alone := [i for i in ranked if i.role is role]:
            return LocalPlan(alone, is_colocated=True)
    return None
