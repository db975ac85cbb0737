"""Which pipeline stage a rank is in, and which ranks of a peer it exchanges KV with (S120).

A stage has some of the model's layers, and the same number of tensor-parallel ranks as the others.
Ranks are numbered stage by stage. A rank has KV of its stage's layers alone, so it exchanges KV
with the ranks of a peer's stage of the same number. Both sides have the same layers on each stage
(`compatibility.py`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankPlace:
    """`num_ranks`: of the whole engine. `stages`: how many layers each stage has; (): one stage."""

    rank: int
    num_ranks: int
    stages: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.num_ranks < 1 or self.num_ranks % self.num_stages:
            raise ValueError(f"{self.num_ranks} ranks do not divide over {self.num_stages} stages")
        if not 0 <= self.rank < self.num_ranks:
            raise IndexError(f"no rank {self.rank} of {self.num_ranks}")
        if len(self.stages) == 1 or any(num_layers < 1 for num_layers in self.stages):
            raise ValueError(f"stages of {self.stages} layers")

    @property
    def num_stages(self) -> int:
        return len(self.stages) or 1

    @property
    def num_beside(self) -> int:
        """The number of ranks in each stage."""
        return self.num_ranks // self.num_stages

    @property
    def stage(self) -> int:
        return self.rank // self.num_beside

    @property
    def rank_in_stage(self) -> int:
        return self.rank % self.num_beside

    @property
    def is_first_to_draw(self) -> bool:
        """Whether vLLM takes this rank's tokens: it is the first rank of the last stage."""
        return self.rank == self.num_ranks - self.num_beside

    def num_beside_of(self, num_theirs: int) -> int:
        """The number of ranks in each stage of a peer that has `num_theirs` ranks.

        Raises ValueError if they do not divide over the stages.
        """
        if num_theirs < 1 or num_theirs % self.num_stages:
            raise ValueError(f"{num_theirs} ranks do not divide over {self.num_stages} stages")
        return num_theirs // self.num_stages

    def first_of(self, num_theirs: int) -> int:
        """The first rank of this stage at a peer. Raises ValueError as `num_beside_of` does."""
        return self.stage * self.num_beside_of(num_theirs)
