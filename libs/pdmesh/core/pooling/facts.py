"""What a pooling model can make of a text: vectors, or scores of classes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class PoolingTask(Enum):
    """The names of vLLM's tasks, and of `pdmesh.v1.PoolingTask` without the prefix."""

    EMBED = "embed"
    CLASSIFY = "classify"


@dataclass(frozen=True, slots=True)
class PoolingFacts:
    """`is_matryoshka`: the first numbers of a vector of the model can serve as a shorter vector.

    `matryoshka_dimensions` lists the lengths of such vectors; empty: any up to `num_dimensions`.
    """

    tasks: frozenset[PoolingTask]
    num_dimensions: int = 0
    is_matryoshka: bool = False
    matryoshka_dimensions: tuple[int, ...] = ()
    is_cross_encoder: bool = False  # it scores pairs of texts
    num_classes: int = 0
    is_lower_case: bool = False  # it was trained on texts without capital letters
    joins_pairs: bool = False  # a pair is one text for it, not two with a separator between them

    def num_values(self, task: PoolingTask, num_dimensions: int = 0) -> int:
        """How many numbers the model makes from one input."""
        if task is PoolingTask.CLASSIFY:
            return self.num_classes
        return num_dimensions or self.num_dimensions

    @property
    def embeds(self) -> bool:
        return PoolingTask.EMBED in self.tasks

    @property
    def scores(self) -> bool:
        """Whether the model scores pairs, as a cross-encoder or by the similarity of vectors."""
        return self.is_cross_encoder or self.embeds

    def why_not_dimensions(self, asked: int) -> str:
        """Why the model's vectors cannot have `asked` dimensions; empty if they can."""
        if not self.is_matryoshka:
            return "this model's vectors have one size only: it is not a matryoshka model"
        if self.matryoshka_dimensions and asked not in self.matryoshka_dimensions:
            known = ", ".join(map(str, self.matryoshka_dimensions))
            return f"this model's vectors may have {known} dimensions"
        if not 1 <= asked <= self.num_dimensions:
            return f"this model's vectors may have 1 to {self.num_dimensions} dimensions"
        return ""
