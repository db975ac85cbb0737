"""A client's validated request for vectors or scores of texts, and the answer."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from pdmesh.core.pooling.facts import PoolingTask
from pdmesh.core.tenancy.limits import ANYONE, Tenant
from pdmesh.services.gateway.routing.pooling_fleet import PoolingModel, PoolingNeeds


@dataclass(frozen=True, slots=True)
class PoolingSpec:
    """A validated request.

    Each input is one text, or a pair of texts. For pairs, `first_lengths` has the number of tokens
    before the second text of each input. `vocabulary` and `canary` are explained in `PoolingNeeds`.
    """

    operation: str  # embeddings, score or rerank
    model: PoolingModel
    task: PoolingTask
    inputs: tuple[array[int], ...] = ()
    first_lengths: tuple[int, ...] = ()
    num_dimensions: int = 0  # 0 means the model's number of dimensions
    use_activation: bool | None = None
    scenario: str = ""
    cache_salt: str = ""
    vocabulary: str = ""
    tenant: Tenant = ANYONE
    canary: tuple[str, bool] | None = None
    field: str = "input"  # the name of the request's field with the inputs, for error messages

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
    """The answer to a request.

    `parts` holds the numbers of each batch in order, as little-endian float32. Each input has
    `num_values` numbers.
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
