"""What a pooling model can make of a text: a vector, or a score for each class."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class PoolingTask(Enum):
    """The values are vLLM's names of its tasks. The names are those of `pdmesh.v1.PoolingTask`
    without its prefix.
    """

    EMBED = "embed"
    CLASSIFY = "classify"


@dataclass(frozen=True, slots=True)
class PoolingFacts:
    """The abilities of a pooling model.

    `is_matryoshka` means that the first numbers of a vector can serve as a shorter vector.
    `matryoshka_dimensions` lists the possible lengths of shorter vectors. If it is empty, any
    length up to `num_dimensions` is possible.
    """

    tasks: frozenset[PoolingTask]
    num_dimensions: int = 0
    is_matryoshka: bool = False
    matryoshka_dimensions: tuple[int, ...] = ()
    is_cross_encoder: bool = False  # the model scores pairs of texts
    num_classes: int = 0
    is_lower_case: bool = False  # the model was trained on texts without capital letters
    joins_pairs: bool = False  # the model reads a pair as one text, without a separator

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
        """Why the model's vectors cannot have `asked` dimensions. The result is empty if
        they can.
        """
        if not self.is_matryoshka:
            return "this model's vectors have one size only: it is not a matryoshka model"
        if self.matryoshka_dimensions and asked not in self.matryoshka_dimensions:
            known = ", ".join(map(str, self.matryoshka_dimensions))
            return f"this model's vectors may have {known} dimensions"
        if not 1 <= asked <= self.num_dimensions:
            return f"this model's vectors may have 1 to {self.num_dimensions} dimensions"
        return ""
