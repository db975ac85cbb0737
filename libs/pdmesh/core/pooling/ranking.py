"""Decides which pooling instances are asked first: near, not avoided, with the fewest open legs.

Nothing is handed over and nothing is cached that matters, so any instance of the model will do.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from pdmesh.core.model import PeerId
from pdmesh.core.placement.plan import DEFAULT_SCENARIO


@dataclass(frozen=True, slots=True)
class PoolingInstance:
    """An instance that takes requests. `num_used`: slots in use, as far as it is known.

    An empty `scenario` serves all.
    """

    id: PeerId
    model: str
    scenario: str
    region: str
    num_slots: int
    num_used: int
    tie: bytes = b""  # orders equally busy instances, otherwise on each gateway


@dataclass(frozen=True, slots=True)
class PoolingQuery:
    """`excluded` instances failed for these inputs; `avoided` ones are asked last."""

    model: str
    scenario: str = ""
    region: str = ""
    excluded: Collection[PeerId] = ()
    avoided: Collection[str] = ()


def ranked(instances: Iterable[PoolingInstance], query: PoolingQuery) -> list[PeerId]:
    """Best first. An instance that is full as far as is known comes after those that are not."""
    scenario = query.scenario or DEFAULT_SCENARIO
    able = [
        i
        for i in instances
        if i.model == query.model
        and (i.scenario or scenario) == scenario
        and i.id not in query.excluded
    ]

    def order(instance: PoolingInstance) -> tuple[bool, bool, bool, float, bytes, PeerId]:
        is_far = bool(query.region) and instance.region not in (query.region, "")
        is_full = instance.num_used >= instance.num_slots
        share = instance.num_used / max(1, instance.num_slots)
        return (
            instance.id.instance_id in query.avoided,
            is_full,
            is_far,
            share,
            instance.tie,
            instance.id,
        )

    return [i.id for i in sorted(able, key=order)]
