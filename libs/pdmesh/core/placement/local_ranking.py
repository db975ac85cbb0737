"""Decides which instances a gateway names for a request while no master answers (S42).

A gateway knows what the registry says and its own open legs. It names the instances of its region
first (S58), then the instances with the fewest of these legs. It avoids instances that are about to
leave or are judged faulty: they are named only if the others cannot serve. A canary gets its share
of the requests, and more if no other group serves (S24). If all instances of one role are gone,
instances of the other role do both phases.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from pdmesh.core.model import Role
from pdmesh.core.placement.plan import DEFAULT_SCENARIO


@dataclass(frozen=True, slots=True)
class LocalInstance:
    """An instance that takes requests, as its record shows it. If `scenario` is empty: of any."""

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
    """`excluded` instances failed for this request; `avoided` instances are named last.

    `canary`: the group of the scenario's canary, and whether it gets this request. `adapter`: only
    instances that take LoRA adapters can serve it; those that have loaded this one come first.
    """

    model: str
    scenario: str = ""
    excluded: Collection[str] = ()
    avoided: Collection[str] = ()
    canary: tuple[str, bool] | None = None
    adapter: str = ""  # digest
    has_images: bool = False  # only instances that take images can serve it


@dataclass(frozen=True, slots=True)
class LocalPlan:
    """Best first. `is_colocated`: one of `prefills` does both phases, whatever its role."""

    prefills: Sequence[LocalInstance] = ()
    decodes: Sequence[LocalInstance] = ()
    is_colocated: bool = False


@dataclass(slots=True)
class LocalRanking:
    """`region` is the gateway's own.

    `gateway_id` orders instances that the gateway has used equally, so that gateways without a
    master do not all begin with the same instance.
    """

    region: str = ""
    gateway_id: str = ""
    _instances: list[LocalInstance] = field(default_factory=list)
    _ties: dict[str, bytes] = field(default_factory=dict)

    def see(self, instances: Iterable[LocalInstance]) -> None:
        """`instances`: all that there are now."""
        self._instances = list(instances)
        self._ties = {i.id: self._ties.get(i.id) or self._tie(i.id) for i in self._instances}

    def rank(self, query: LocalQuery, num_open: Callable[[str, int], int]) -> LocalPlan:
        """`num_open`: own open legs by instance and incarnation. Empty if nothing can serve."""
        scenario = query.scenario or DEFAULT_SCENARIO  # scenarios share no instances (S4)
        able = [
            i
            for i in self._instances
            if i.model == query.model
            and i.id not in query.excluded
            and (i.scenario or scenario) == scenario
            and (not query.adapter or i.takes_adapters)
            and (not query.has_images or i.takes_images)
        ]

        def order(instance: LocalInstance) -> tuple[bool, bool, int, bytes]:
            is_far = bool(self.region) and instance.region not in (self.region, "")
            is_new = bool(query.adapter) and query.adapter not in instance.adapters
            num = num_open(instance.id, instance.incarnation)
            return is_far, is_new, num, self._ties[instance.id]

        able.sort(key=order)
        for some in ([i for i in able if i.id not in query.avoided], able):
            if query.canary is not None:
                group_id, is_its_turn = query.canary
                one_side = [i for i in some if (i.group_id == group_id) is is_its_turn]
                if (plan := _paired(one_side)) is not None:
                    return plan
            if (plan := _paired(some) or _colocated(some)) is not None:
                return plan
        return LocalPlan()

    def _tie(self, instance_id: str) -> bytes:
        name = instance_id.encode()
        if not self.gateway_id:
            return name
        return hashlib.blake2b(name, key=self.gateway_id.encode()[:64], digest_size=8).digest()


def _paired(ranked: Sequence[LocalInstance]) -> LocalPlan | None:
    prefills = [i for i in ranked if i.role in (Role.PREFILL, Role.FUSION)]
    decodes = [i for i in ranked if i.role is Role.DECODE]
    pairs = {i.pair for i in decodes}
    can_serve = any(i.role is Role.FUSION or i.pair in pairs for i in prefills)
    return LocalPlan(prefills, decodes) if can_serve else None


def _colocated(ranked: Sequence[LocalInstance]) -> LocalPlan | None:
    for role in (Role.PREFILL, Role.DECODE):
        if alone := [i for i in ranked if i.role is role]:
            return LocalPlan(alone, is_colocated=True)
    return None
