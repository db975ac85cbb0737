"""Decides, in a prefill's scheduler, which of the fetched image embeddings a step uses.

A request names the images whose embeddings the workers have fetched for it. No other request uses
these embeddings, and the workers keep them until the request ends. So no embedding that a step
needs can be missing. The step encodes all other images of its requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

LANDED: Final = "embeddings"  # a key in the kv_transfer_params of a request


def landed_params(leg: int, identifiers: Sequence[str]) -> dict[str, Any]:
    """The content of `LANDED`, as plain values that vLLM passes on."""
    return {"leg": leg, "identifiers": list(identifiers)}


@dataclass(slots=True)
class EmbeddingPlan:
    """What the workers do before a step's forward, in this order.

    A leg is the number of a request's stay on this instance.
    """

    loads: list[tuple[int, str]] = field(default_factory=list)  # (leg, image)
    dropped_legs: list[int] = field(default_factory=list)


class EmbeddingPlanner:
    """`consider` sets the request that the next calls are about."""

    def __init__(self) -> None:
        self._leg, self._identifiers = 0, frozenset[str]()
        self._plan = EmbeddingPlan()

    def consider(self, params: Mapping[str, Any] | None) -> None:
        landed = (params or {}).get(LANDED)
        self._leg = landed["leg"] if landed else 0
        self._identifiers = frozenset(landed["identifiers"] if landed else ())

    def has(self, identifier: str) -> bool:
        return identifier in self._identifiers

    def allocated(self, identifier: str) -> None:
        """vLLM needs the request's image in the step that it is planning."""
        if identifier in self._identifiers:
            self._plan.loads.append((self._leg, identifier))

    def finished(self, params: Mapping[str, Any] | None) -> None:
        if landed := (params or {}).get(LANDED):
            self._plan.dropped_legs.append(landed["leg"])

    def take(self, num_tokens: int) -> EmbeddingPlan:
        """The plan of a step that computes `num_tokens`.

        vLLM's older model runner passes no plan on to its workers in a step without tokens. So the
        order to drop a leg's embeddings waits for the next step with tokens. A step with loads
        always has tokens.
        """
        if not num_tokens:
            return EmbeddingPlan()
        plan, self._plan = self._plan, EmbeddingPlan()
        return plan
