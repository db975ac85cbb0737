"""Decides which pooling instances are asked first: not avoided, with a free slot, near, least busy.

Pooling hands nothing over and needs no cached prefix, so any instance of the model can take an
input. All inputs of a call go to instances with one fingerprint, since vectors of different models
cannot be compared.
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
    """An instance that takes requests. An empty `scenario` serves all."""

    id: PeerId
    model: str
    scenario: str
    region: str
    num_slots: int
    tie: bytes = b""  # orders equally busy instances; it differs between gateways
    fingerprint: str = ""  # of the model
    group_id: str = ""


@dataclass(frozen=True, slots=True)
class PoolingQuery:
    """`excluded` instances failed for these inputs; `avoided` ones are asked last.

    `fingerprint`: only instances with this fingerprint are asked; None: all. `canary`: the group of
    the scenario's canary, and whether the canary gets this call.
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
    """Best first, at most `MOST_RANKED`. Full instances come after others, avoided ones last.

    `num_used`: an instance's slots in use, as far as known.
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
    """The canary's instances, or all others, by the call's turn.

    If there are none, or only avoided ones, all instances may take the call.
    """
    if query.canary is None:
        return able
    group_id, is_its_turn = query.canary
    side = [i for i in able if (i.group_id == group_id) is is_its_turn]
    return side if any(i.id.instance_id not in query.avoided for i in side) else able
