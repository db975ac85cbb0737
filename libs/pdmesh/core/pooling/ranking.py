"""Decides in which order a gateway asks pooling instances, best first.

A pooling instance makes vectors or scores. Of two instances, one that is not avoided comes first,
then one with a free slot, then the nearer one, then the less busy one. A pooling instance hands no
KV over and needs no cached prefix, so any instance of the model can take any input. All inputs of a
call go to instances with one fingerprint, because vectors of different models cannot be compared.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Final

from pdmesh.core.model import PeerId
from pdmesh.core.placement.plan import DEFAULT_SCENARIO

MOST_RANKED: Final = 128


@dataclass(frozen=True, slots=True)
class PoolingInstance:
    """An instance that accepts requests.

    If `scenario` is empty, it serves all scenarios (kinds of requests).
    """

    id: PeerId
    model: str
    scenario: str
    region: str
    num_slots: int
    tie: bytes = b""  # orders equally busy instances; each gateway has its own order
    fingerprint: str = ""  # equal for instances with the same model
    group_id: str = ""


@dataclass(frozen=True, slots=True)
class PoolingQuery:
    """Which instances may take an input.

    Instances in `excluded` have failed for this input. Instances in `avoided` are asked last. Only
    instances with the given `fingerprint` are asked; None means all. A canary is a group that tries
    out a new revision. `canary` has the id of the scenario's canary group, and whether that group
    gets this call.
    """

    model: str
    scenario: str = ""
    region: str = ""
    excluded: Collection[PeerId] = ()
    avoided: Collection[str] = ()
    fingerprint: str | None = None
    canary: tuple[str, bool] | None = None


def ranked(
    instances: Iterable[PoolingInstance],
    query: PoolingQuery,
    num_used: Callable[[PeerId], int],
) -> list[PeerId]:
    """The instances that can take an input, best first, at most `MOST_RANKED`.

    Full instances come after others, and avoided ones last. `num_used` returns an instance's slots
    in use, as far as known.
    """
    scenario = query.scenario or DEFAULT_SCENARIO
    able = [
        i
        for i in instances
        if i.model == query.model
        and (i.scenario or scenario) == scenario
        and query.fingerprint in (None, i.fingerprint)
        and i.id not in query.excluded
    ]

    def order(instance: PoolingInstance) -> tuple[bool, bool, bool, float, bytes, PeerId]:
        used = num_used(instance.id)
        is_far = bool(query.region) and instance.region not in (query.region, "")
        return (
            instance.id.instance_id in query.avoided,
            used >= instance.num_slots,
            is_far,
            used / max(1, instance.num_slots),
            instance.tie,
            instance.id,
        )

    return [i.id for i in heapq.nsmallest(MOST_RANKED, _of_side(able, query), key=order)]


def _of_side(able: list[PoolingInstance], query: PoolingQuery) -> list[PoolingInstance]:
    """The instances on the call's side: the canary's, or all others.

    If there are none, or only avoided ones, all instances may take the call.
    """
    if query.canary is None:
        return able
    group_id, is_its_turn = query.canary
    side = [i for i in able if (i.group_id == group_id) is is_its_turn]
    return side if any(i.id.instance_id not in query.avoided for i in side) else able
