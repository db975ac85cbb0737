"""Lets the ranks of a node exchange values while one of them reads the weights.

Every call is collective: each rank makes the same calls in the same order. Each wait has a limit.
When a rank's process ends, the other ranks notice at once, because its connection ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final, Protocol

from pdmesh.errors import EngineFailed

WAIT_S: Final = 300.0  # for the slowest rank, and for the bytes of one window of a weight file


class RankLost(EngineFailed):
    """Another rank of the node ended, or did not answer in time."""

    default_reason = "RANK_LOST"


class NodeRanks(Protocol):
    """The tensor-parallel ranks on one node. One of them is the reader."""

    @property
    def size(self) -> int: ...
    @property
    def is_reader(self) -> bool: ...
    def highest(self, values: Sequence[int]) -> list[int]:
        """The largest of the ranks' values, for each position. Raises RankLost."""
        ...

    def from_reader(self, data: bytes) -> bytes:
        """The reader's `data`. The `data` of other ranks is ignored. Raises RankLost."""
        ...


class LoneRank:
    """The only rank of its node."""

    size, is_reader = 1, True

    def highest(self, values: Sequence[int]) -> list[int]:
        return list(values)

    def from_reader(self, data: bytes) -> bytes:
        return data


class TorchRanks:
    """Ranks with a separate torch.distributed group, over gloo. The first rank is the reader.

    A process makes at most one object for given members. torch would give a second group the name
    of the first, and the second would wait at the addresses of the first.
    """

    def __init__(self, members: Sequence[int], wait_s: float = WAIT_S) -> None:
        """`members` are global ranks. Each member makes this object. Other ranks do nothing."""
        import torch.distributed as dist

        self._dist: Any = dist
        self._group = dist.new_group(
            list(members),
            timeout=timedelta(seconds=wait_s),
            backend="gloo",
            use_local_synchronization=True,
        )
        self._reader = members[0]
        self.size = len(members)
        self.is_reader = dist.get_rank() == members[0]

    def highest(self, values: Sequence[int]) -> list[int]:
        import torch

        told = torch.tensor(list(values), dtype=torch.int64)
        self._call(self._dist.all_reduce, told, op=self._dist.ReduceOp.MAX)
        return list(map(int, told))

    def from_reader(self, data: bytes) -> bytes:
        import torch

        (length,) = self.highest([len(data) if self.is_reader else 0])
        told = torch.zeros(length, dtype=torch.uint8)
        if self.is_reader and length:
            told = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if length:
            self._call(self._dist.broadcast, told, src=self._reader)
        return bytes(told.numpy())

    def _call(self, function: Any, *args: Any, **options: Any) -> None:
        try:
            function(*args, group=self._group, **options)
        except RuntimeError as error:  # gloo raises it for a closed connection and for a timeout
            cause = str(error).strip().splitlines()[0][:200]
            raise RankLost(f"a rank that loads the weights is gone or too slow: {cause}") from error
