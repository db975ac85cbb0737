"""Copies between KV blocks in host memory and a contiguous buffer (S50).

The sender gathers blocks into the buffer, and the receiver scatters the buffer into its blocks
(RecvScatter). A long run of consecutive blocks is copied in one operation. Otherwise numpy selects
rows by an index array, which is fast with 8-byte words. Torch tensors are passed as
`t.view(torch.uint8).numpy()`, without a copy. One thread does the work, because memory is the
limit, and a second thread would take a core from the engine's step.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from pdmesh.kv.transport.base import ByteArray

ByteMatrix = npt.NDArray[np.uint8]  # (blocks, bytes of a block in one layer), rows contiguous
BlockIds = Sequence[int] | npt.NDArray[np.integer[Any]]
Run = tuple[int, int, int]  # first block in the cache, first place in the buffer, number of blocks

# If the runs have at least this size on average, one copy per run is faster than one selection of
# all rows. Measured on 64 MiB in pieces of 4 to 96 KiB.
_RUN_BYTES = 128 << 10


def runs_of(ids: npt.NDArray[np.intp]) -> list[Run]:
    """The ids as the fewest possible runs of consecutive ids, in order."""
    if not len(ids):
        return []
    cuts = (ids[1:] - ids[:-1] != 1).nonzero()[0] + 1  # np.diff costs as much as a small copy
    return [(int(ids[a]), a, b - a) for a, b in pairwise([0, *cuts.tolist(), len(ids)])]


class HostBlocks:
    """The blocks of all layers in host memory, prepared for any number of copies.

    Layers may have different block sizes. Raises ValueError if the rows of a layer are not
    contiguous.
    """

    def __init__(self, caches: Sequence[ByteMatrix]) -> None:
        self._rows = [_words(cache) for cache in caches]
        self._num_blocks = min((cache.shape[0] for cache in caches), default=0)
        self._block_bytes = sum(int(cache.shape[1]) for cache in caches)

    def gather(self, block_ids: BlockIds, out: ByteArray) -> None:
        """Copy the blocks of each layer into `out`, layer by layer.

        Raises ValueError if a block does not exist, or if `out` has another size or has gaps.
        """
        ids, runs = self._plan(block_ids, out)
        start = 0
        for rows in self._rows:
            target, start = _next_rows(out, start, len(ids), rows)
            if runs is None:
                # The ids are checked already. In mode "raise", numpy would use an extra buffer.
                np.take(rows, ids, axis=0, out=target, mode="clip")
                continue
            for first, place, count in runs:
                target[place : place + count] = rows[first : first + count]

    def scatter(self, source: ByteArray, block_ids: BlockIds) -> None:
        """Copy `source`, laid out as `gather` writes it, to the blocks of each layer.

        Raises ValueError as `gather` does.
        """
        ids, runs = self._plan(block_ids, source)
        start = 0
        for rows in self._rows:
            landed, start = _next_rows(source, start, len(ids), rows)
            _put_rows(rows, ids, runs, landed)

    def scatter_part(self, data: ByteArray, offset: int, block_ids: BlockIds) -> None:
        """Copy `data`, a part of the buffer that `scatter` takes, to the blocks.

        The part begins at byte `offset` of the buffer. It may begin and end inside a layer. Raises
        ValueError if the part cuts a block or is not inside the buffer, or if a block does not
        exist.
        """
        ids = np.asarray(block_ids, dtype=np.intp)
        start = 0  # where the layer begins in the whole buffer
        end = offset + data.size
        planned, runs = (0, 0), list[Run]()  # the same for all layers that are whole in the part
        for rows in self._rows:
            block_bytes = rows.shape[1] * rows.itemsize
            stop = start + len(ids) * block_bytes
            low, high = max(start, offset), min(stop, end)
            if low < high:
                first, rest = divmod(low - start, block_bytes)
                count, more = divmod(high - low, block_bytes)
                if rest or more:
                    raise ValueError(f"bytes {offset} to {end} do not hold whole blocks")
                some = ids[first : first + count]
                if planned != (first, count):
                    planned, runs = (first, count), self._runs(some)
                _scatter_rows(rows, some, runs, data[low - offset : high - offset])
            start = stop
        if end > start or offset < 0:
            raise ValueError(f"bytes {offset} to {end} are outside a buffer of {start} bytes")

    def _runs(self, ids: npt.NDArray[np.intp]) -> list[Run]:
        """The runs of checked ids. The check is per run, because numpy's min and max are slower."""
        runs = runs_of(ids)
        if any(first < 0 or first + count > self._num_blocks for first, _, count in runs):
            raise ValueError(f"block ids outside 0..{self._num_blocks - 1}")
        return runs

    def _plan(
        self, block_ids: BlockIds, buffer: ByteArray
    ) -> tuple[npt.NDArray[np.intp], list[Run] | None]:
        """The checked ids, and their runs if a copy per run is faster than a selection."""
        ids = np.asarray(block_ids, dtype=np.intp)
        expected = len(ids) * self._block_bytes
        if buffer.size != expected:
            raise ValueError(
                f"{len(ids)} blocks need {expected} bytes, the buffer has {buffer.size}"
            )
        if not buffer.flags.c_contiguous:
            raise ValueError("the buffer must be contiguous")
        runs = self._runs(ids)
        return ids, runs if _is_faster(runs, expected // max(1, len(self._rows))) else None


def _is_faster(runs: Sequence[Run], num_bytes: int) -> bool:
    """Whether a copy per run is faster than a selection, for `num_bytes` of one layer."""
    return len(runs) == 1 or num_bytes // max(1, len(runs)) >= _RUN_BYTES


def _scatter_rows(
    rows: npt.NDArray[Any], ids: npt.NDArray[np.intp], runs: Sequence[Run], data: ByteArray
) -> None:
    landed = data.view(rows.dtype).reshape(len(ids), rows.shape[1])
    _put_rows(rows, ids, runs if _is_faster(runs, data.size) else None, landed)


def _put_rows(
    rows: npt.NDArray[Any],
    ids: npt.NDArray[np.intp],
    runs: Sequence[Run] | None,
    landed: npt.NDArray[Any],
) -> None:
    if runs is None:
        rows[ids] = landed
        return
    for first, place, count in runs:
        rows[first : first + count] = landed[place : place + count]


def gather(caches: Sequence[ByteMatrix], block_ids: BlockIds, out: ByteArray) -> None:
    """`HostBlocks.gather`, for caches that are used once."""
    HostBlocks(caches).gather(block_ids, out)


def recv_scatter(src: ByteArray, caches: Sequence[ByteMatrix], block_ids: BlockIds) -> None:
    """`HostBlocks.scatter`, for caches that are used once."""
    HostBlocks(caches).scatter(src, block_ids)


def scatter_part(
    data: ByteArray, offset: int, caches: Sequence[ByteMatrix], block_ids: BlockIds
) -> None:
    """`HostBlocks.scatter_part`, for caches that are used once."""
    HostBlocks(caches).scatter_part(data, offset, block_ids)


def _next_rows(
    buffer: ByteArray, start: int, count: int, like: npt.NDArray[Any]
) -> tuple[npt.NDArray[Any], int]:
    """`count` rows of the buffer from `start` on, shaped like the rows of `like`.

    Also returns the position after them.
    """
    width = like.shape[1]
    end = start + count * width * like.itemsize
    return buffer[start:end].view(like.dtype).reshape(count, width), end


def _words(cache: ByteMatrix) -> npt.NDArray[Any]:
    """The same bytes as rows of the widest words that divide a block."""
    if not cache.flags.c_contiguous:
        raise ValueError("a layer's blocks must be contiguous")
    has_words = cache.shape[1] % 8 == 0 and cache.ctypes.data % 8 == 0
    return cache.view(np.int64 if has_words else np.uint8)
