"""The message from the workers to the scheduler that comes with a step's output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata

from pdmesh.core.instance.step_times import ComputedStep


class StepNews(KVConnectorWorkerMetadata):
    """Token 1 of requests by leg, from any rank, and the times of the last steps, from one rank.

    A leg is the number of a request's stay on this instance.
    """

    def __init__(
        self, first_tokens: Mapping[int, int], computed: Sequence[ComputedStep] = ()
    ) -> None:
        self.first_tokens = first_tokens
        self.computed = computed

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StepNews:
        assert isinstance(other, StepNews)
        first_tokens = {**self.first_tokens, **other.first_tokens}
        return StepNews(first_tokens, self.computed or other.computed)
