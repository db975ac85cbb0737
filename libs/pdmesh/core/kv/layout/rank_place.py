"""Finds a rank's pipeline stage, and the ranks of a peer with which it exchanges KV (S120).

A stage has some of the model's layers. All stages have the same number of tensor-parallel ranks,
and ranks are numbered stage by stage. A rank has KV only for the layers of its stage. So a rank of
stage i exchanges KV only with the ranks of stage i at the peer. Both engines must have the same
layers on each stage (`compatibility.py`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankPlace:
    """The place of one rank in an engine of `num_ranks` ranks.

    `stages` has the number of layers of each stage. It is empty if there is only one stage.
    """

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
        """Whether this is the first rank of the last stage, from which vLLM takes the tokens."""
        return self.rank == self.num_ranks - self.num_beside

    def num_beside_of(self, num_theirs: int) -> int:
        """The number of ranks in each stage of a peer that has `num_theirs` ranks.

        Raises ValueError if the ranks do not divide over the stages.
        """
        if num_theirs < 1 or num_theirs % self.num_stages:
            raise ValueError(f"{num_theirs} ranks do not divide over {self.num_stages} stages")
        return num_theirs // self.num_stages

    def first_of(self, num_theirs: int) -> int:
        """The first rank of this rank's stage at a peer that has `num_theirs` ranks.

        Raises ValueError if the ranks do not divide over the stages.
        """
        return self.stage * self.num_beside_of(num_theirs)
