"""Converts the abilities of a pooling instance between its record and the core's type.

A pooling instance makes vectors or scores of whole texts.
"""

from __future__ import annotations

from typing import Final

from pdmesh.core.pooling.facts import PoolingFacts, PoolingTask
from pdmesh.v1 import common_pb2

_TASKS: Final = {
    PoolingTask.EMBED: common_pb2.POOLING_TASK_EMBED,
    PoolingTask.CLASSIFY: common_pb2.POOLING_TASK_CLASSIFY,
}


def task_to_proto(task: PoolingTask) -> common_pb2.PoolingTask.ValueType:
    return _TASKS[task]


def pooling_to_proto(facts: PoolingFacts) -> common_pb2.PoolingFacts:
    return common_pb2.PoolingFacts(
        tasks=[number for task, number in _TASKS.items() if task in facts.tasks],
        num_dimensions=facts.num_dimensions,
        is_matryoshka=facts.is_matryoshka,
        matryoshka_dimensions=facts.matryoshka_dimensions,
        is_cross_encoder=facts.is_cross_encoder,
        num_classes=facts.num_classes,
        is_lower_case=facts.is_lower_case,
        joins_pairs=facts.joins_pairs,
    )


def pooling_from_proto(m: common_pb2.PoolingFacts) -> PoolingFacts:
    """The facts, without tasks that this release does not know."""
    return PoolingFacts(
        tasks=frozenset(task for task, number in _TASKS.items() if number in m.tasks),
        num_dimensions=m.num_dimensions,
        is_matryoshka=m.is_matryoshka,
        matryoshka_dimensions=tuple(m.matryoshka_dimensions),
        is_cross_encoder=m.is_cross_encoder,
        num_classes=m.num_classes,
        is_lower_case=m.is_lower_case,
        joins_pairs=m.joins_pairs,
    )
