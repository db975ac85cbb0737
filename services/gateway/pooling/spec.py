"""A validated pooling request of a client, and its answer."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from pdmesh.core.pooling.facts import PoolingTask
from pdmesh.core.tenancy.limits import ANYONE, Tenant
from pdmesh.services.gateway.routing.pooling_fleet import PoolingModel, PoolingNeeds


@dataclass(frozen=True, slots=True)
class PoolingSpec:
    """`first_lengths`: for pairs of texts, how many tokens come before the second text of each.

    `vocabulary` and `canary` as in `PoolingNeeds`.
    """

    operation: str  # embeddings, score or rerank
    model: PoolingModel
    task: PoolingTask
    inputs: tuple[array[int], ...] = ()
    first_lengths: tuple[int, ...] = ()
    num_dimensions: int = 0  # 0: the model's own
    use_activation: bool | None = None
    scenario: str = ""
    cache_salt: str = ""
    vocabulary: str = ""
    tenant: Tenant = ANYONE
    canary: tuple[str, bool] | None = None
    field: str = "input"  # the request's field that holds the inputs

    @property
    def needs(self) -> PoolingNeeds:
        return PoolingNeeds(self.model, self.scenario, self.vocabulary, self.canary)

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.inputs))

    @property
    def num_values(self) -> int:
        """How many numbers the answer has for each input."""
        return self.model.facts.num_values(self.task, self.num_dimensions)


@dataclass(frozen=True, slots=True)
class PoolingAnswer:
    """`parts`: the little-endian float32 numbers of each batch, in order.

    Each input has `num_values` numbers.
    """

    parts: Sequence[bytes]
    num_values: int
    num_inputs: int
    num_cached_tokens: int = 0

    def vectors(self) -> list[memoryview]:
        """The bytes of each input's numbers."""
        size = 4 * self.num_values
        return [
            memoryview(part)[at : at + size]
            for part in self.parts
            for at in range(0, len(part), size)
        ]
